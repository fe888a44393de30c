"""Local shards of parameters that are DTensors, for optimizers that exchange them."""

import contextlib
import math
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

_grad: Any = torch.Tensor.grad


def local_shards(params: Any) -> Any:
    """Return parameters with each DTensor replaced by its local shard.

    FSDP2 and tensor parallelism shard a parameter as a DTensor.  Ranks that hold the same shard
    exchange it as an ordinary tensor.  The shard shares the memory of the DTensor.  Its ``grad`` is
    the DTensor's; during a step it is that gradient's local shard (:func:`local_gradients`).

    Args:
        params: parameters, named parameters or parameter groups, as optimizers take them.

    Returns:
        The same structure with local shards, which may have no elements.

    Example::

        >>> from comm_hooks.shards import local_shards
        >>> [p is q for p, q in zip(local_shards(model.parameters()), model.parameters())]
        [True, True]
    """
    if isinstance(params, torch.Tensor):
        return params  # torch refuses it with its own error
    converted = []
    for entry in params:
        if isinstance(entry, Mapping):
            members = entry["params"]
            members = [members] if isinstance(members, torch.Tensor) else members
            converted.append({**entry, "params": [_local(member) for member in members]})
        else:
            converted.append(_local(entry))
    return converted


def require_part_for_all(owner: object, parameters: Iterable[torch.Tensor]) -> None:
    """Raise ``ValueError`` on all ranks if one of them holds no element of a sharded model.

    Args:
        owner: the optimizer; its class is named in the message.
        parameters: the parameters of the model, or this rank's shards of them.
    """
    wholes = [whole(parameter) for parameter in parameters]
    if any(map(is_sharded, wholes)) and not any(map(is_held_by_all, wholes)):
        raise ValueError(
            f"{type(owner).__name__}: its parameters have too few rows for the ranks that they are "
            "sharded over, so that some ranks hold no elements: shard them over fewer ranks"
        )


def _local(member: Any) -> Any:
    """Return a parameter, named or not, as its local shard if it is a DTensor."""
    if isinstance(member, tuple):
        name, parameter = member
        return name, _local(parameter)
    return _Part.of(member) if is_sharded(member) else member


class _Part(nn.Parameter):
    """The local shard of a DTensor, as an ordinary parameter.

    Attributes:
        whole: the DTensor.
        is_local: whether :attr:`grad` is the gradient of this shard; else it is the DTensor's.
    """

    whole: Any
    is_local: bool

    @staticmethod
    def of(whole: Any) -> "_Part":
        with torch.no_grad():
            part = _Part(whole.to_local(), requires_grad=whole.requires_grad)
        part.whole, part.is_local = whole, False
        return part

    @property
    def grad(self) -> Any:
        return _grad.__get__(self) if self.is_local else self.whole.grad

    @grad.setter
    def grad(self, value: Any) -> None:
        if self.is_local:
            _grad.__set__(self, value)
        else:
            self.whole.grad = value


def is_sharded(parameter: object) -> bool:
    """Return whether a parameter is a DTensor."""
    return hasattr(parameter, "device_mesh")


def is_held_by_all(parameter: Any) -> bool:
    """Return whether every model-parallel rank holds an element of a parameter.

    The result is equal on all ranks.
    """
    if not is_sharded(parameter):
        return bool(parameter.numel())
    shape = list(parameter.shape)
    for size, placement in zip(parameter.device_mesh.shape, parameter.placements, strict=True):
        if placement.is_shard():
            length = shape[placement.dim]
            # Chunks of equal length; the last one may be shorter.
            shape[placement.dim] = max(0, length - (size - 1) * math.ceil(length / size))
    return bool(math.prod(shape))


def shard_groups(parameters: Iterable[torch.Tensor]) -> list[dist.ProcessGroup]:
    """Return the process groups of this rank over which the model is sharded.

    Args:
        parameters: the parameters of the model or their local shards, on one device mesh.
    """
    for parameter in map(whole, parameters):
        if is_sharded(parameter):
            owner: Any = parameter
            return [
                owner.device_mesh.get_group(dim)
                for dim, placement in enumerate(owner.placements)
                if placement.is_shard()
            ]
    return []


def whole(parameter: torch.Tensor) -> torch.Tensor:
    """Return the DTensor of a local shard; return any other tensor unchanged."""
    return parameter.whole if isinstance(parameter, _Part) else parameter


def like_whole(value: torch.Tensor, part: torch.Tensor) -> torch.Tensor:
    """Return local ``value`` as a DTensor like that of ``part``; unchanged if ``part`` has none."""
    parameter: Any = whole(part)
    if parameter is part:
        return value
    return type(parameter.data).from_local(
        value,
        parameter.device_mesh,
        parameter.placements,
        run_check=False,
        shape=parameter.shape,
        stride=parameter.stride(),
    )


@contextlib.contextmanager
def local_gradients(parameters: Iterable[torch.Tensor]) -> Iterator[None]:
    """Within this context, set ``grad`` of local shards to the shard of their DTensor's gradient.

    Outside of it ``grad`` is the whole DTensor's gradient, so that ``GradScaler`` and
    ``clip_grad_norm_`` compute the same on all model-parallel ranks.  At its start the shards are
    set to the present memory of their DTensors, which FSDP may have moved.

    Args:
        parameters: local shards and ordinary parameters.
    """
    entered = [p for p in parameters if isinstance(p, _Part) and not p.is_local]
    for part in entered:
        parameter = part.whole
        with torch.no_grad():
            current = parameter.to_local()
            if current.data_ptr() != part.data_ptr():  # FSDP pads uneven shards at the first pass
                part.data = current
            part.is_local = True
            part.grad = None if parameter.grad is None else parameter.grad.to_local()
    try:
        yield
    finally:
        for part in entered:
            part.grad = None
            part.is_local = False


def nominal_shape(parameter: Any) -> tuple[int, ...]:
    """Return the shape of a parameter; for a DTensor ``(n,)``: elements / shards, rounded up.

    It is equal on all ranks, though their shards may differ by a row.
    """
    if not is_sharded(parameter):
        return tuple(parameter.shape)
    parts = math.prod(
        size
        for size, placement in zip(parameter.device_mesh.shape, parameter.placements, strict=True)
        if placement.is_shard()
    )
    return (math.ceil(parameter.numel() / parts),)
