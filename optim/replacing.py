"""Put the optimizer of low_communication in the place of an AdamW that exists already."""

import functools
from collections.abc import Iterable
from typing import Any

from torch import nn
from torch.optim import Adam, Optimizer

from comm_hooks.checkpoints.protocol import CARRIED, whole_state
from comm_hooks.frameworks.ddp.hook import register
from comm_hooks.frameworks.ddp.model import find_ddp
from comm_hooks.frameworks.ddp.optimizer import unwrapped
from comm_hooks.optim.low_communication import low_communication
from comm_hooks.optim.rounds.local_rounds import LocalRounds
from comm_hooks.shards import is_sharded, whole

_TAKEN = "lr", "betas", "eps", "weight_decay", "named_parameters"


def replace(model: nn.Module, optimizer: Any, *, scheduler: Any = None, **settings: Any) -> Any:
    """Put :func:`~comm_hooks.optim.low_communication` in the place of an AdamW, and register it.

    Call it on all ranks, after the model is wrapped and the optimizer is made or loaded::

        optimizer = comm_hooks.replace(ddp_model, optimizer)

    1. The groups are taken over, with their learning rates, betas, eps and weight decay.  They stay
       the same dictionaries: a scheduler of the AdamW, or code that sets ``group["lr"]``, goes on
       to work, and so do hooks of its steps.
    2. So are its moments: the second one as it is, the first one divided by the root of the second,
       which is about LaProp's.
    3. If the AdamW has loaded a state of the optimizer that this function returns, all of it is
       restored, on the rank that saved it with residuals and local progress.
    4. :func:`comm_hooks.register` is called.
    5. From then on ``step()`` of the AdamW raises an error.

    Args:
        model: the DDP model, or what a framework returns for it; see :func:`comm_hooks.register`.
        optimizer: ``AdamW``, or ``Adam`` without weight decay; Accelerate or Fabric may wrap it.
        scheduler: a learning-rate scheduler of the AdamW, or several, from then on bound to the
            returned optimizer.  Others keep on working.
        settings: ``total_steps``, ``bits_per_parameter``, ``inner``, ``process_group`` and
            ``transport`` of :func:`~comm_hooks.optim.low_communication`.  The process group is by
            default DDP's.

    Returns:
        The optimizer.  Where a framework's wrapper was given: that wrapper, with the optimizer
        inside.  Evaluate in ``model.eval()``, and end with ``synchronize()``.

    Raises:
        ValueError: for another optimizer, or settings of AdamW without an equivalent (``amsgrad``,
            ``maximize``, decay that is part of the gradient); for a scheduler of another optimizer;
            for ``inner="muon"``, which has other groups and moments, if the AdamW has a scheduler
            or a state; for bad settings.

    Not supported: the AdamW loads a saved state of shards, or of Muon: load these afterwards.

    Example::

        >>> import torch, comm_hooks
        >>> adamw = torch.optim.AdamW(ddp_model.parameters(), lr=0.01)
        >>> scheduler = torch.optim.lr_scheduler.StepLR(adamw, 1, gamma=0.5)
        >>> optimizer = comm_hooks.replace(ddp_model, adamw, bits_per_parameter=8.0)
        >>> ddp_model(torch.ones(1, 8)).sum().backward()
        >>> optimizer.step()
        >>> scheduler.step()
        >>> optimizer.param_groups[0]["lr"]
        0.005
    """
    old = unwrapped(optimizer)
    _require_adamw(old)
    if given := sorted(settings.keys() & set(_TAKEN)):
        raise ValueError(
            f"replace(): {given[0]} is taken over from {type(old).__name__}: set it there"
        )
    schedulers = list(_schedulers(scheduler, optimizer, old))
    is_in_use = old.state or hasattr(old.step, "_wrapped_by_lr_sched")
    if is_in_use and settings.get("inner") == "muon":
        raise ValueError(
            f"replace(): {type(old).__name__} has a state or a scheduler, which is of no use for "
            "inner='muon': replace it before"
        )
    if CARRIED not in old.param_groups[0] and any("horizon" in group for group in old.param_groups):
        raise ValueError(
            f"replace(): {type(old).__name__} was replaced before, or has loaded a part of the "
            "state of an optimizer that replace() returned: use that one, and load its state there"
        )
    ddp = find_ddp(model)
    if ddp is not None:
        settings.setdefault("process_group", ddp.process_group)
    rounds = _successor(model if ddp is None else ddp.module, old, settings)
    register(model, rounds)
    _take_over_state(rounds, old)
    _retire(old, rounds)
    for each in schedulers:
        each.optimizer = rounds
    if optimizer is old:
        return rounds
    if hasattr(optimizer, "_optimizer"):  # Fabric
        optimizer._optimizer = rounds
    else:  # Accelerate
        type(optimizer).__init__(optimizer, rounds, device_placement=False, scaler=optimizer.scaler)
    return optimizer


def take_over(model: nn.Module, optimizer: Any, **settings: Any) -> Any:
    """Replace an AdamW, or register an optimizer that exchanges; return the state to save.

    For frameworks: ``settings`` are those of :func:`replace`, or none.
    """
    if isinstance(unwrapped(optimizer), Adam):
        return unwrapped(replace(model, optimizer, **settings))
    return register(model, optimizer, **settings)


def _require_adamw(optimizer: Any) -> None:
    name = type(optimizer).__name__
    if isinstance(optimizer, LocalRounds):
        raise ValueError(f"replace(): {name} exchanges by itself: call register(model, optimizer)")
    if not isinstance(optimizer, Adam):
        raise ValueError(
            f"replace() takes torch.optim.AdamW, or Adam without weight decay, got {name}: make "
            "one of them, or comm_hooks.optim.low_communication(model.named_parameters(), lr=...)"
        )


def _schedulers(given: Any, *owners: Any) -> Iterable[Any]:
    """Yield the schedulers, and those inside of them; ``ValueError`` for another optimizer's."""
    for each in given if isinstance(given, list | tuple) else [given] * (given is not None):
        inside = getattr(each, "_schedulers", None) or getattr(each, "scheduler", None)
        if inside is not None:  # of SequentialLR, ChainedScheduler; of Accelerate
            yield from _schedulers(inside, *owners)
        if (own := getattr(each, "optimizer", None)) is None:
            continue
        if not any(own is owner for owner in owners):
            raise ValueError(
                f"replace(): {type(each).__name__} is of another optimizer, {type(own).__name__}"
            )
        yield each


def _successor(module: nn.Module, old: Optimizer, settings: dict[str, Any]) -> LocalRounds:
    """Return the new optimizer with the groups of the old one, named by the module."""
    names = {p: name.replace("_orig_mod.", "") for name, p in module.named_parameters()}
    groups: list[dict[str, Any]] = []
    for group in old.param_groups:
        own = [names.get(p) or f"{len(groups)}.{i}" for i, p in enumerate(group["params"])]
        groups.append({**group, "param_names": own})
        groups[-1].pop(CARRIED, None)
    first = groups[0]
    return low_communication(groups, lr=first.get("initial_lr", first["lr"]), **settings)


def _take_over_state(rounds: LocalRounds, old: Optimizer) -> None:
    if (carried := old.param_groups[0].get(CARRIED)) is not None:
        rounds.load_state_dict(carried)
        return
    if not old.state:
        return
    state = old.state_dict()
    state["state"] = {
        key: {k: v.to_local() if is_sharded(v) else v for k, v in of_one.items()}
        for key, of_one in state["state"].items()
    }
    rounds.inner.load_state_dict(state)


def _retire(old: Optimizer, rounds: LocalRounds) -> None:
    """Give groups and hooks of the old optimizer to the new one, and refuse its steps."""
    if len(old.param_groups) == len(rounds.inner.param_groups):  # Muon's are others
        for mine, group in zip(old.param_groups, rounds.inner.param_groups, strict=True):
            mine.clear()
            mine.update(group)
        rounds.inner.param_groups = list(old.param_groups)
    old.state.clear()
    for name, hooks in vars(old).items():
        if name.startswith("_optimizer_") and name.endswith("_hooks"):
            hooks.update(getattr(rounds, name))
            setattr(rounds, name, hooks)
    if not any(is_sharded(whole(p)) for p in rounds.parameters):
        rounds.register_state_dict_post_hook(_carry)
    rounds.register_load_state_dict_pre_hook(lambda _, state: whole_state(state))
    take = rounds.step

    @functools.wraps(take)
    def step(*args: Any, **kwargs: Any) -> Any:
        # What a scheduler asks before it warns of a step that is missing.
        old._opt_called = rounds._opt_called = True  # type: ignore[attr-defined]
        return take(*args, **kwargs)

    def refuse(*args: Any, **kwargs: Any) -> None:
        raise ValueError(
            f"{type(old).__name__} was replaced: call step() of the optimizer that "
            "comm_hooks.replace() returned"
        )

    step._wrapped_by_lr_sched = refuse._wrapped_by_lr_sched = True  # type: ignore[attr-defined]
    rounds.step, old.step = step, refuse  # type: ignore[assignment, method-assign]


def _carry(optimizer: Optimizer, state: dict[str, Any]) -> dict[str, Any]:
    """Put a whole state into its first group, where an AdamW that loads it keeps it."""
    groups = [dict(group) for group in state["param_groups"]]  # an AdamW adds keys to its own
    groups[0][CARRIED] = state
    return {**state, "param_groups": groups}
