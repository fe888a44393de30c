"""The recommended optimizer of local steps, for a given number of bits per parameter."""

import math
import warnings
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.optim import SGD
from torch.optim.optimizer import ParamsT

from comm_hooks.collectives.base import Transport
from comm_hooks.collectives.torch_distributed import TorchDistributed
from comm_hooks.compressors.sparse import TopK
from comm_hooks.exchange import Exchange
from comm_hooks.memory.error_feedback import ErrorFeedback
from comm_hooks.optim.base import parameters_of, require_distinct_names
from comm_hooks.optim.frozen import trains
from comm_hooks.optim.hyperparameters import check_hyperparameters, check_own_settings
from comm_hooks.optim.laprop import LaProp
from comm_hooks.optim.muon_adamw import MuonAdamW
from comm_hooks.optim.rounds.clock import cut
from comm_hooks.optim.rounds.local_rounds import LocalRounds
from comm_hooks.requirements import require_choice, require_positive, require_within
from comm_hooks.shards import is_held_by_all, is_sharded, local_shards, nominal_shape

INNER = ("adamw", "muon")

_DENSITY = 1 / 180
"""The density of payloads below which one more local step costs less loss."""
_SPARSEST, _DENSEST = 1 / 256, 1 / 48
"""Below the first and above the second density, the loss rises again in most tasks."""
_FADES = 4.0
"""The share of a residual that fades between two exchanges, divided by the density."""
_OUTER = 1.5
"""The outer learning rate, divided by the square root of the number of ranks."""
_OVERLAP = 0.5
"""The power of c that divides an element sent by c ranks: their noise adds up to sqrt(c)."""
_AHEAD = {"adamw": 0.3, "muon": 0.45}
"""By ``inner``: the share of its residual by which a rank starts ahead of the shared model."""
_GATHERED = 4  # the largest number of ranks without shards
_BACK = 2.0
"""The density of the means that owners of shards send, divided by that of ranks' payloads."""
_SHORTEST, _LONGEST = 2, 128  # local steps
_SAFE = 16
"""The number of local steps up to which it matters little that some elements are never sent."""
_SETTINGS = ("lr", "betas", "eps", "weight_decay", "horizon")
"""The settings that a parameter group may have of its own."""
_HORIZON = 0.5
"""The horizon of the first moment, divided by AdamW's: residuals act as a momentum as well."""
_MUON_MOMENTUM = 0.8  # a quarter of the horizon of the usual 0.95: residuals hold longer


@dataclass(frozen=True)
class RoundsPlan:
    """The settings that :func:`low_communication` chooses.

    Args:
        local_steps: K, the number of steps between two exchanges of a parameter.
        fragments: the number of parts of the model that are exchanged in turn within K steps.
        sharded: whether each rank averages one shard and sends the mean to the other ranks.
        density: the share of a displacement's elements that is sent.
        decay: the factor by which residuals are multiplied in each exchange.
        outer_lr: the learning rate of the step along the mean of the sent displacements.
        bits: the number of bits that a rank sends per parameter and step.
    """

    local_steps: int
    fragments: int
    sharded: bool
    density: float
    decay: float
    outer_lr: float
    bits: float


def low_communication(
    named_parameters: Iterable[tuple[str, nn.Parameter]] | ParamsT,
    *,
    lr: float,
    betas: tuple[float, float] = (0.9, 0.95),
    eps: float = 1e-8,
    weight_decay: float = 0.1,
    total_steps: int | None = None,
    bits_per_parameter: float = 0.09,
    inner: str = "adamw",
    process_group: dist.ProcessGroup | None = None,
    transport: Transport | None = None,
) -> LocalRounds:
    r"""Return an optimizer that replaces AdamW and sends at most a given number of bits.

    Rounds of local steps (:class:`~comm_hooks.optim.LocalRounds`) that send only the largest
    displacements, as signs (top-k, one bit a value, places in Rice code) with error feedback.
    Chosen from the number of ranks N and the budget are

    * K, the steps between two exchanges of a parameter: two, or the fewest with which one in 180
      elements can be sent.  With fewer steps ranks drift apart less, with a higher density less
      waits in residuals.  With K = 1 gradients repeat updates that wait in the residual, however
      many bits there are;
    * the density p: as large as the budget then allows, up to one in 48; beyond it more bits make
      the loss worse with some tasks;
    * the decay of the residuals, 1 - 4 p per exchange, a quarter of the time that an element waits
      in the mean: older residuals are mostly noise;
    * the outer step, 1.5 sqrt(N): a coordinate that one of N ranks sends arrives divided by N; one
      that c ranks send is divided by sqrt(c), too (``overlap``);
    * above four ranks, unless the model is small, a sharded exchange: each rank averages a shard
      and sends the mean with twice the density;
    * the fragments of the model, exchanged one after the other: K, or one if the model is so small
      that headers are most of the traffic.

    Each rank works 0.3 of its residual ahead of the shared model, 0.45 with Muon (``look_ahead``).
    Weight decay is the same on all ranks and not sent (``shared_decay``).

    Memory: 12 bytes per parameter in addition to the moments: the shared model, the residual, and
    the start of the local steps.

    Local steps are those of :class:`~comm_hooks.optim.LaProp`, which normalizes gradients before it
    averages them, with half the horizon of ``betas[0]``: the residuals act as a momentum, too.

    Take the learning rate and schedule of AdamW; a little more is often better.  Not its cycles of
    betas: ``OneCycleLR(cycle_momentum=False)``.  DDP must not average: ``register(model,
    optimizer)``, or train the model itself.  Frozen parameters are left out.

    Args:
        named_parameters: ``model.named_parameters()``, or parameters and groups of them as torch's
            optimizers take them; a group's own ``lr``, ``betas``, ``eps`` and
            ``weight_decay`` take precedence; :func:`comm_hooks.replace` takes over an AdamW.
        lr: the largest learning rate, of groups without one; schedulers get the returned optimizer.
        betas: the betas of the AdamW that is replaced, also those in a group.
        eps: as in AdamW.
        weight_decay: decoupled weight decay, as in AdamW.
        total_steps: the number of steps of the training, if known: it then has at least twenty
            rounds, of more than 16 steps only if every element is sent at least once on average.
            If None, such rounds come with a warning that says how long an element waits.
        bits_per_parameter: the bits that a rank may send per parameter and step, on average.
            Buffers that are averaged, such as running means, take about a sixteenth more.
        inner: ``"adamw"``, or ``"muon"``: Muon for the hidden matrices, told by name from
            embeddings and output layers (:class:`~comm_hooks.optim.MuonAdamW`), with a momentum of
            0.8.  Its displacements have few large elements: it ends above all-reduce with Muon,
            and below all-reduce with AdamW.
        process_group: the ranks; by default all of them.
        transport: how ranks reach each other, in place of a process group.

    Returns:
        The optimizer: evaluate and save within ``server_parameters()``, end with ``synchronize()``.

    Raises:
        ValueError: for values out of range; for groups of an optimizer with other settings
            (``momentum``, ``maximize``, ``amsgrad``); for a budget that no setting meets, with
            the smallest that one does; if ``torch.distributed`` is not initialized.

    Not supported: the same as in :class:`~comm_hooks.optim.LocalRounds`.

    Example::

        >>> import torch
        >>> from comm_hooks.optim import low_communication
        >>> optimizer = low_communication(model.named_parameters(), lr=1e-3, total_steps=1000)
        >>> for _ in range(4):
        ...     model(torch.ones(1, 8)).square().sum().backward()
        ...     optimizer.step()
        ...     optimizer.zero_grad()
        >>> optimizer.synchronize()
    """
    where = "low_communication"
    groups = _groups(named_parameters)
    check_hyperparameters(where, lr=lr, betas=betas, eps=eps, weight_decay=weight_decay)
    own_rates = [group.get("initial_lr", group.get("lr")) for group in groups]
    if lr not in own_rates and None not in own_rates:
        warnings.warn(
            f"{where}: lr={lr:g} has no effect: every group has an lr of its own, {own_rates}, as "
            "the groups of another optimizer have: set it in the groups, or remove theirs",
            stacklevel=2,
        )
    require_within(where, "bits_per_parameter", bits_per_parameter, "(0, inf)")
    require_choice(where, "inner", inner, INNER)
    if total_steps is not None:
        require_positive(where, "total_steps", total_steps)
    members = [member for group in groups for member in group["params"]]
    if not members:
        raise ValueError(f"{where}: there are no parameters in named_parameters")
    require_distinct_names(where, [name for name, _ in members])
    trained = {name: p for name, p in members if trains(p)}
    if not trained:
        raise ValueError(f"{where}: all the parameters are frozen (requires_grad=False)")
    if inner == "muon" and len(groups) > 1:
        raise ValueError(
            f"{where}: inner='muon' makes its own groups, of hidden matrices and of all others: "
            "give model.named_parameters()"
        )
    if inner == "muon" and all(name.isdecimal() for name in trained):
        raise ValueError(
            f"{where}: inner='muon' tells hidden matrices from embeddings by their names: give "
            "model.named_parameters()"
        )
    transport = transport or TorchDistributed(process_group)
    if inner == "muon" and any(is_sharded(p) for _, p in members):
        raise ValueError(f"{where}: inner='muon' needs whole matrices; for shards use 'adamw'")
    shapes = {name: nominal_shape(p) for name, p in trained.items()}
    plan = plan_rounds(
        shapes,
        transport,
        bits_per_parameter,
        total_steps,
        # The same on all ranks, though some may hold nothing of a small parameter.
        most_fragments=max(1, sum(map(is_held_by_all, trained.values()))),
    )
    if total_steps is None and plan.local_steps > _SAFE:
        warnings.warn(
            f"{where}: with {bits_per_parameter:g} bits per parameter and step an element is sent "
            f"once in {plan.local_steps / plan.density:.0f} steps in the mean; shorter trainings "
            "can end worse than without exchange: give total_steps, to have this checked",
            stacklevel=2,
        )
    settings: Any = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay}
    parts = local_shards(groups)
    local = (
        LaProp(parts, horizon=_HORIZON, **settings)
        if inner == "adamw"
        else MuonAdamW(
            parts[0]["params"],
            momentum=_MUON_MOMENTUM,
            rest=partial(LaProp, horizon=_HORIZON),
            **{key: parts[0].get(key, value) for key, value in settings.items()},
        )
    )
    rounds = LocalRounds(
        local,
        make_exchange(plan.density, transport, sharded=plan.sharded, decay=plan.decay),
        SGD(filter(trains, parameters_of(local.param_groups)), lr=plan.outer_lr),
        local_steps=plan.local_steps,
        fragments=plan.fragments,
        look_ahead=_AHEAD[inner],
        shared_decay=True,
    )
    count = sum(math.prod(shape) for shape in shapes.values())
    steps = plan.local_steps / plan.fragments  # between two exchanges
    rounds.round_state.buffers.budget = plan.bits * count * steps / 8
    return rounds


def _groups(given: Any) -> list[dict[str, Any]]:
    """Return parameter groups with named parameters; an unnamed one is named by its index."""
    if isinstance(given, torch.Tensor | Mapping):
        raise ValueError(
            "low_communication: give model.named_parameters(), or a list of parameters or of "
            f"groups, got {type(given).__name__}"
        )
    entries = list(given)
    groups = entries if entries and isinstance(entries[0], Mapping) else [{"params": entries}]
    result, count = [], 0
    for group in groups:
        members = group["params"]
        if isinstance(given, set) or isinstance(members, set):
            raise ValueError(
                "low_communication: parameters must have an order that is the same on all ranks, "
                "got a set"
            )
        members = [members] if isinstance(members, torch.Tensor) else list(members)
        # Where another optimizer has put them.
        names = group.get("param_names") or [str(count + i) for i in range(len(members))]
        named = [
            member if isinstance(member, tuple) else (name, member)
            for name, member in zip(names, members, strict=True)
        ]
        count += len(named)
        check_own_settings("low_communication", group, _SETTINGS)
        if group.get("decoupled_weight_decay") is False and group.get("weight_decay"):
            raise ValueError(
                "low_communication: a group has decoupled_weight_decay=False, decay that is part "
                "of the gradient, which is not supported: remove it, and choose weight_decay again"
            )
        own = {k: v for k, v in group.items() if k not in ("decoupled_weight_decay", "param_names")}
        result.append({**own, "params": named})
        if not named:
            result[-1]["param_names"] = []  # torch asks all groups for names, or none
        if "betas" in group:
            check_hyperparameters("low_communication", betas=group["betas"])
    return result


def make_exchange(
    density: float, transport: Transport, *, sharded: bool, decay: float = 1.0
) -> Exchange:
    """Return an exchange that sends the signs of the largest elements, with error feedback."""
    compressor = TopK(density=density, value_bits=1, index_code="rice", overlap=_OVERLAP)
    return Exchange(
        compressor,
        ErrorFeedback(decay=decay),
        # In units of the learning rate, norms and biases compete with matrices on equal terms;
        # in full they would be most of the traffic of a small model.
        min_ndim=1,
        min_numel=1,
        granularity="bucket",
        collective="sharded" if sharded else "all_gather",
        downlink=replace(compressor, density=_BACK * density) if sharded else None,
        transport=transport,
    )


def plan_rounds(
    shapes: Mapping[str, Sequence[int]],
    transport: Transport,
    budget: float,
    total_steps: int | None = None,
    *,
    most_fragments: int | None = None,
) -> RoundsPlan:
    """Return the plan with the fewest local steps, and then the highest density, within a budget.

    Args:
        shapes: the shapes of the parameters, by name.
        transport: the ranks' transport, asked for their number; nothing is sent.
        budget: the number of bits per parameter and step that a rank may send.
        total_steps: the number of steps of the training, if known.
        most_fragments: the largest number of fragments; by default the number of parameters.

    Raises:
        ValueError: if no plan meets the budget; the message has the smallest budget of a plan.
    """
    ranks = transport.world_size
    most = len(shapes) if most_fragments is None else most_fragments
    longest = _LONGEST if total_steps is None else _longest(total_steps)
    named, numels = list(shapes.items()), [math.prod(shape) for shape in shapes.values()]

    def bits(density: float, local_steps: int, fragments: int, sharded: bool) -> float:
        """Return the bits that a rank sends per parameter and step."""
        exchange = make_exchange(density, transport, sharded=sharded)
        sent = sum(
            exchange.bytes_per_round(dict(named[i] for i in part), {"contributors": (ranks,)})
            for part in cut(numels, fragments)
        )
        return 8 * sent / local_steps / sum(numels)

    forms = [
        (local_steps, fragments, sharded)
        for local_steps in range(_SHORTEST, longest + 1)
        # In several fragments the link is used evenly, and every one has headers of its own.
        for fragments in sorted({min(local_steps, most), 1}, reverse=True)
        # Up to a few ranks shards send as much as an all-gather, and lose by compressing again.
        for sharded in ((True, False) if ranks > _GATHERED else (False,))
    ]
    fitting = (form for form in forms if bits(_DENSITY, *form) <= budget)
    form = next(fitting, min(forms[-2:], key=lambda form: bits(_SPARSEST, *form)))
    if (least := bits(_SPARSEST, *form)) > budget:
        raise ValueError(
            f"low_communication: {budget:g} bits per parameter and step are too few: {longest} "
            f"local steps per exchange need {math.ceil(1e4 * least) / 1e4:g}"
            + (f" (total_steps={total_steps} allows no more)" if total_steps else "")
        )
    sparse, dense = _SPARSEST, _DENSEST
    for _ in range(20):  # until it is known to a millionth
        middle = math.sqrt(sparse * dense)
        if bits(middle, *form) <= budget:
            sparse = middle
        else:
            dense = middle
    return RoundsPlan(
        *form,
        density=sparse,
        decay=max(0.5, 1 - _FADES * sparse),
        outer_lr=_OUTER * math.sqrt(ranks) if ranks > 1 else 1.0,
        bits=bits(sparse, *form),
    )


def _longest(total_steps: int) -> int:
    """Return the largest number of local steps for a training of this length.

    A training has at least twenty rounds.  With more than 16 local steps, K, it sends every
    element, which takes K / density steps.
    """
    in_turn = int(_DENSITY * total_steps)
    return max(_SHORTEST, min(_LONGEST, total_steps // 20, max(_SAFE, in_turn)))
