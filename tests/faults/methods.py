"""The methods of the disturbed runs."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch

from comm_hooks import (
    SRHT,
    CountSketch,
    Differences,
    ErrorFeedback,
    Exchange,
    ExchangeSettings,
    GaussianSketch,
    Identity,
    PermK,
    Quantize,
    RandomK,
    Sign,
    TopK,
)
from comm_hooks.collectives import Simulated
from comm_hooks.compressors.cocktail import Cocktail
from comm_hooks.compressors.dct import DCTTopK
from comm_hooks.memory import MomentumCorrection
from comm_hooks.optim import LocalRounds, MuonAdamW, Participation
from comm_hooks.optim.laprop import LaProp
from comm_hooks.optim.registry import OPTIMIZERS as REGISTRY
from comm_hooks.optim.registry import OptimizerEntry
from tests.faults.training import (
    HookTraining,
    OptimizerTraining,
    RoundsTraining,
    Settings,
    ShardedTraining,
    Training,
)


@dataclass(frozen=True)
class Method:
    """One way to train.

    Args:
        name: in the table.
        group: the column of the table.
        make: makes one rank of a run.
        settings: with which.
        other: of the exchange, another compressor that could be meant as well.
        ranks: how many.
        steps: how many; all faults come before the last :data:`LATEST` of them.
        traits: which faults it can have, beside those that all can; see
            :mod:`tests.faults.kinds`.
    """

    name: str
    group: str
    make: Callable[[Settings], Training]
    settings: Settings
    other: Any
    ranks: int = 2
    steps: int = 14
    traits: frozenset[str] = frozenset()


HOOKS, OPTIMIZERS, ROUNDS, SHARDED = "hooks", "optimizers", "rounds", "sharded models"

_TOP_K = {"compressor": TopK(1 / 8), "memory": ErrorFeedback()}
_SIGN = {"compressor": Sign(), "memory": ErrorFeedback()}
_OTHER_TOP_K = TopK(1 / 4)


def _hook(name: str, exchange: dict[str, Any], other: Any, **options: Any) -> Method:
    options.setdefault("make", HookTraining)
    return Method(name, HOOKS, settings=Settings(exchange), other=other, **options)


@dataclass(frozen=True)
class _Small:
    """The settings of a registered optimizer for a model this small.

    Args:
        exchange: of the method; None for the published one.
        other: another compressor that a user could mean.
        options: of the optimizer.
        ranks, steps: their numbers.
        clients: how many take part in rounds; 0 for ranks.
        closure: whether a step takes one.
        local_steps: whether some steps exchange nothing.
    """

    exchange: Mapping[str, Any] | None = None
    other: Any = _OTHER_TOP_K
    options: Mapping[str, Any] = field(default_factory=lambda: {"lr": 0.01})
    ranks: int = 2
    steps: int = 14
    clients: int = 0
    closure: bool = False
    local_steps: bool = False


def _registered(entry: OptimizerEntry, small: _Small, name: str = "") -> Method:
    """Return the method of a registered optimizer."""
    exchange = small.exchange
    if exchange is None:
        made = Exchange(ExchangeSettings.from_dict(entry.published), transport=Simulated(1)[0])
        exchange = {"compressor": made.compressor, "memory": made.memory}
    if entry.works_in_rounds and entry.name != "zero_one_adam":
        return _rounds(name or entry.type_name, entry.make, exchange, small)
    traits = {"closure": small.closure, "local steps": small.local_steps}
    return Method(
        name or entry.type_name,
        OPTIMIZERS,
        partial(OptimizerTraining, kind=entry.make, closure=small.closure),
        Settings(exchange, small.options),
        small.other,
        small.ranks,
        small.steps,
        frozenset(trait for trait, has in traits.items() if has),
    )


def _local_rounds(params: Any, exchange: Exchange, *, lr: float, **options: Any) -> LocalRounds:
    return LocalRounds(torch.optim.AdamW(params, lr=lr), exchange, **options)


def _low_communication(
    params: Any, exchange: Exchange, *, lr: float, muon: bool = False, **options: Any
) -> LocalRounds:
    """Return what ``low_communication`` makes, with an exchange that can be exchanged."""
    named = list(params)
    inner = MuonAdamW(named, lr=lr, rest=LaProp) if muon else LaProp(named, lr=lr)
    server = torch.optim.SGD([p for _, p in named], lr=2.0)
    return LocalRounds(
        inner, exchange, server, look_ahead=0.3, shared_decay=True, fragments=2, **options
    )


def _rounds(name: str, kind: Callable[..., Any], exchange: Any, small: _Small) -> Method:
    """Return a method that works in rounds."""
    options: dict[str, Any] = {"local_steps": 2}
    if small.clients:
        options = {"participation": Participation(clients=small.clients, fraction=0.75)}
    return Method(
        name,
        ROUNDS,
        partial(RoundsTraining, kind=kind, clients=small.clients),
        Settings(exchange, {**small.options, **options}),
        small.other,
        steps=12 if small.clients else 24,
        traits=frozenset({"clients" if small.clients else "local steps"}),
    )


def _sharded(name: str, kind: Any, exchange: dict[str, Any], **options: Any) -> Method:
    works_in_rounds = "local_steps" in options
    return Method(
        f"{name}, FSDP",
        SHARDED,
        partial(ShardedTraining, kind=kind),
        Settings(exchange, {"lr": 0.01, **options}),
        _OTHER_TOP_K,
        ranks=4,
        steps=24 if works_in_rounds else 14,
        traits=frozenset({"local steps"} if works_in_rounds else ()),
    )


_FROZEN = {"lr": 0.01, "freeze_step": 3}
_SHARDED_SIGN = {**_SIGN, "collective": "sharded"}
_QUANTIZED = _Small({"compressor": Quantize(bits=4), "memory": ErrorFeedback()}, Quantize(bits=8))
_PLAIN = _Small({"compressor": Identity()}, Quantize(bits=8))

_SMALL = {
    "local_variance_adam": _Small(_TOP_K),
    "one_bit_adam": _Small(_SHARDED_SIGN, options=_FROZEN),
    "one_bit_lamb": _Small(_SHARDED_SIGN, options=_FROZEN),
    "zero_one_adam": _Small(
        _SHARDED_SIGN,
        options={"lr": 0.01, "var_freeze_step": 3, "local_step_scaler": 4, "local_step_clipper": 2},
        steps=20,
        local_steps=True,
    ),
    "cd_adam": _Small({"compressor": Sign(), "memory": Differences(), "collective": "sharded"}),
    "ef21": _Small(
        {"compressor": TopK(1 / 8), "memory": Differences()},
        options={"lr": 0.05, "momentum": 0.9},
        ranks=3,
    ),
    "micro_adam": _Small(
        {
            "compressor": TopK(1 / 8, value_bits=4),
            "collective": "sharded",
            "memory": ErrorFeedback(bits=4, stochastic=True),
        }
    ),
    "fetch_sgd": _Small(
        {"compressor": CountSketch(0.5)},
        CountSketch(0.25),
        {"lr": 0.01, "rows": 3, "density": 0.1},
    ),
    "marina": _Small({"compressor": PermK()}, RandomK(0.25), {"lr": 0.02, "p": 0.3}, closure=True),
    "dgc": _Small(
        {"compressor": TopK(1 / 8), "memory": MomentumCorrection(0.9)},
        options={"lr": 0.02, "clip_norm": 1.0},
        ranks=3,
    ),
    "demo": _Small(
        {"compressor": DCTTopK(chunk=16, density=1 / 8), "memory": ErrorFeedback(decay=0.999)},
        DCTTopK(chunk=16, density=1 / 4),
        {"lr": 0.002},
    ),
    "cocktail_sgd": _Small(
        {
            "compressor": Cocktail(mask=0.5, density=0.25),
            "collective": "sharded",
            "memory": ErrorFeedback(),
        },
        Cocktail(mask=0.5, density=0.5),
        {"lr": 0.02, "momentum": 0.9},
    ),
    "safl": _Small(
        {"compressor": CountSketch(0.5), "granularity": "bucket"},
        CountSketch(0.25),
        {"lr": 0.01, "local_lr": 0.1},
    ),
    "fed_avg": replace(_PLAIN, options={"lr": 0.05}, clients=6),
    "fed_ams": _PLAIN,
    "fed_lamb": _PLAIN,
    "diloco": _QUANTIZED,
    "mu_lo_co": _QUANTIZED,
    "sparse_loco": _Small(
        {"compressor": TopK(1 / 8, value_bits=2), "memory": ErrorFeedback(decay=0.95)}
    ),
}
"""By the name in the registry.  Another optimizer has its published exchange."""


def _methods() -> Iterator[Method]:
    yield _hook("count_sketch", {"compressor": CountSketch(0.25)}, CountSketch(0.5))
    yield _hook("srht", {"compressor": SRHT(0.25)}, SRHT(0.5))
    yield _hook("gaussian_sketch", {"compressor": GaussianSketch(0.25)}, GaussianSketch(0.5))
    yield _hook("topk", _TOP_K, _OTHER_TOP_K)
    yield _hook("sign", _SIGN, TopK(1 / 4), make=partial(HookTraining, by_register=True))
    yield _hook("quantize", {"compressor": Quantize(bits=4)}, Quantize(bits=8))
    yield _hook("random_k", {"compressor": RandomK(0.25)}, RandomK(0.5))
    yield _hook("perm_k", {"compressor": PermK()}, RandomK(0.5), ranks=3)
    yield _hook("identity, 16 bits", {"compressor": Identity(16)}, Identity(32))
    yield _hook("topk, sharded", {**_TOP_K, "collective": "sharded"}, _OTHER_TOP_K, ranks=3)
    nodes = {"collective": "hierarchical", "ranks_per_node": 2}
    yield _hook("topk, hierarchical", {**_TOP_K, **nodes}, _OTHER_TOP_K, ranks=4)
    yield _hook("topk, bucket", {**_TOP_K, "granularity": "bucket"}, _OTHER_TOP_K)

    for key, entry in REGISTRY.items():
        if entry.averages == "exchange":
            yield _registered(entry, _SMALL.get(key, _Small()))
    two_nodes = replace(_SMALL["local_variance_adam"], exchange={**_TOP_K, **nodes}, ranks=4)
    yield _registered(REGISTRY["local_variance_adam"], two_nodes, "LocalVarianceAdam, hierarchical")

    fragments = _Small(options={"lr": 0.01, "fragments": 2})
    yield _rounds("LocalRounds", _local_rounds, _TOP_K, _Small())
    yield _rounds("LocalRounds, fragments", _local_rounds, _TOP_K, fragments)
    yield _rounds("LocalRounds, clients", _local_rounds, _TOP_K, _Small(clients=6))
    signs = TopK(1 / 8, value_bits=1, index_code="rice", overlap=0.5)
    recommended = {
        "compressor": signs,
        "memory": ErrorFeedback(decay=0.5),
        "granularity": "bucket",
        "min_numel": 1,
    }
    shards = {**recommended, "collective": "sharded", "downlink": replace(signs, density=1 / 4)}
    muon = _Small(options={"lr": 0.01, "muon": True})
    yield _rounds("low_communication", _low_communication, recommended, _Small())
    yield _rounds("low_communication, shards", _low_communication, shards, _Small())
    yield _rounds("low_communication, Muon", _low_communication, recommended, muon)

    yield _sharded("LocalVarianceAdam", REGISTRY["local_variance_adam"].make, _SIGN)
    yield _sharded("low_communication", _low_communication, recommended, local_steps=2)
    yield _sharded("LocalRounds", _local_rounds, _TOP_K, local_steps=2)


METHODS = {method.name: method for method in _methods()}
