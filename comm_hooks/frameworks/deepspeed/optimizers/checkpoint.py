"""What every rank saves of its optimizer, beside what DeepSpeed saves of rank 0's."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from comm_hooks.collectives.requests import AllGatherObject
from comm_hooks.optim import LocalVarianceAdam, ZeroOneAdam
from comm_hooks.optim.exchanging import ExchangingOptimizer
from comm_hooks.wire.checksum import fingerprint
from comm_hooks.wire.stamp import digest

# State that differs between ranks, by class.
_OWN = {LocalVarianceAdam: ("exp_avg_sq",)}


def state_dict(engine: Any) -> dict[str, Any]:
    """Return what this rank must save of an exchanging optimizer, beside its exchange's state.

    DeepSpeed saves rank 0's model and optimizer.  That is enough for state that is equal on all
    ranks; this is the rest of it, and a checksum of that.

    Returns:
        Plain values and tensors, safe for ``weights_only``; empty for other optimizers.
    """
    optimizer = engine.basic_optimizer
    if not isinstance(optimizer, ExchangingOptimizer):
        return {}
    state: dict[str, Any] = {
        "type": type(optimizer).__name__,
        "checksum": _checksum(optimizer),
    }
    if not _is_synchronized(optimizer):
        state["optimizer"] = optimizer.state_dict()
        state["parameters"] = [p.detach() for p in _parameters(optimizer)]
    own = _own_keys(optimizer)
    if own:
        states = [optimizer.state[p] for p in _parameters(optimizer)]
        state["own"] = [{key: s[key] for key in own if key in s} for s in states]
    return state


def load_state_dict(engine: Any, state: Mapping[str, Any]) -> None:
    """Restore what :func:`state_dict` returned on this rank, after DeepSpeed has loaded its part.

    Raises:
        ValueError: on all ranks, if on any of them the model and the optimizer are not those that
            it had when it saved.
    """
    optimizer = engine.basic_optimizer
    if not isinstance(optimizer, ExchangingOptimizer):
        return
    complaint = _wrong_type(optimizer, [state])
    if not complaint:
        if "parameters" in state:
            optimizer.load_state_dict(state["optimizer"])
            _set_parameters(engine, state["parameters"])
        _set_own(optimizer, state.get("own", []))
        complaint = _wrong_values(optimizer, [state])
    _complain_together(optimizer, complaint)


def load_state_dicts(engine: Any, states: Sequence[Mapping[str, Any]]) -> None:
    """Restore the states of all ranks of a run with another number of ranks, in rank order.

    Second moments that were each rank's own (LocalVarianceAdam) start from their mean.

    Raises:
        ValueError: on all ranks, if model and optimizer are not those that were saved, or if they
            were saved between synchronizations (ZeroOneAdam), when every rank had others.
    """
    optimizer = engine.basic_optimizer
    if not isinstance(optimizer, ExchangingOptimizer):
        return
    complaint = _wrong_type(optimizer, states)
    if not complaint and any("parameters" in state for state in states):
        complaint = (
            f"it was saved between synchronizations, when its {len(states)} ranks had different "
            "parameters: load it on as many ranks, call synchronize() on the optimizer, and save"
        )
    if not complaint:
        own = [state.get("own", []) for state in states]
        _set_own(optimizer, [_mean(saved) for saved in zip(*own, strict=True)])
        complaint = _wrong_values(optimizer, states)
    _complain_together(optimizer, complaint)


def _parameters(optimizer: ExchangingOptimizer) -> list[torch.Tensor]:
    return [p for group in optimizer.param_groups for p in group["params"]]


def _own_keys(optimizer: ExchangingOptimizer) -> tuple[str, ...]:
    return next((keys for kind, keys in _OWN.items() if isinstance(optimizer, kind)), ())


def _is_synchronized(optimizer: ExchangingOptimizer) -> bool:
    return not isinstance(optimizer, ZeroOneAdam) or optimizer.is_synchronized


def _checksum(optimizer: ExchangingOptimizer) -> int:
    """Return a fingerprint of parameters and state that ranks share."""
    own = _own_keys(optimizer)
    parameters = _parameters(optimizer)
    tensors = [p.detach() for p in parameters]
    for parameter in parameters:
        state = optimizer.state.get(parameter, {})
        tensors += [t for key, t in state.items() if key not in own and torch.is_tensor(t)]
    # Counters of steps are on the CPU, wherever parameters are.
    by_device: dict[torch.device, list[torch.Tensor]] = {}
    for tensor in tensors:
        by_device.setdefault(tensor.device, []).append(tensor)
    return digest([int(fingerprint(group)) for group in by_device.values()])


def _set_parameters(engine: Any, values: Sequence[torch.Tensor]) -> None:
    """Give the optimizer's parameters these values, and the model's, where they are others."""
    with torch.no_grad():
        for parameter, value in zip(_parameters(engine.basic_optimizer), values, strict=True):
            parameter.copy_(value)
        if engine.optimizer is not engine.basic_optimizer:
            models = [p for group in engine.optimizer.fp16_groups for p in group]
            for parameter, value in zip(models, values, strict=True):
                parameter.copy_(value)


def _set_own(optimizer: ExchangingOptimizer, own: Sequence[Mapping[str, torch.Tensor]]) -> None:
    for parameter, saved in zip(_parameters(optimizer), own, strict=bool(own)):
        for key, value in saved.items():
            optimizer.state[parameter][key] = value.to(parameter.device, copy=True)


def _mean(saved: Sequence[Mapping[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    return {key: torch.stack([s[key] for s in saved]).mean(0) for key in saved[0]}


def _wrong_type(optimizer: ExchangingOptimizer, states: Sequence[Mapping[str, Any]]) -> str:
    here = type(optimizer).__name__
    others = sorted({str(state.get("type")) for state in states} - {here})
    return f"it was saved by {', '.join(others)}" if others else ""


def _wrong_values(optimizer: ExchangingOptimizer, states: Sequence[Mapping[str, Any]]) -> str:
    checksum = _checksum(optimizer)
    wrong = [str(i) for i, state in enumerate(states) if state["checksum"] != checksum]
    if not wrong:
        return ""
    return (
        "the model and the optimizer that were loaded are not those that "
        + ("this rank" if len(states) == 1 else f"rank {', '.join(wrong)}")
        + " had when it saved: the files are of different checkpoints"
    )


def _complain_together(optimizer: ExchangingOptimizer, complaint: str) -> None:
    """Raise on all ranks if one of them has a complaint."""
    transport = optimizer.exchange.transport
    complaints = transport.perform(AllGatherObject(complaint))
    named = [f"rank {rank}: {text}" for rank, text in enumerate(complaints) if text]
    if named:
        raise ValueError(
            f"this checkpoint cannot be loaded into {type(optimizer).__name__}: {'; '.join(named)}"
        )
