"""Parameters of sharded models: optimizers that exchange work on the part that a rank holds."""

import contextlib
import math
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

_grad: Any = torch.Tensor.grad


def local_shards(params: Any) -> Any:
    """Return parameters with the local part of each DTensor in its place.

    FSDP2 and tensor parallelism keep a parameter in parts, as a DTensor.  Ranks that hold the same
    part exchange it; to them it is an ordinary tensor.  The part shares the DTensor's memory, and
    its gradient, of which it has its part during a step (:func:`local_gradients`).

    Args:
        params: parameters, named parameters or parameter groups, as optimizers take them.

    Returns:
        Those, but for DTensors, of which this rank's part is there.  It may have no elements.

    Example::

        >>> from comm_hooks.shards import local_shards
        >>> [p is q for p, q in zip(local_shards(model.parameters()), model.parameters())]
        [True, True]
    """
    if isinstance(params, torch.Tensor):
        return params  # which torch refuses in words of its own
    converted = []
    for entry in params:
        if isinstance(entry, Mapping):
            members = entry["params"]
            members = [members] if isinstance(members, torch.Tensor) else members
            converted.append({**entry, "params": list(_parts(members))})
        else:
            converted += _parts([entry])
    return converted


def require_part_for_all(owner: object, parameters: Iterable[torch.Tensor]) -> None:
    """Raise ``ValueError`` on all ranks if some that shard a model hold nothing of it.

    Args:
        owner: whose class the message names.
        parameters: of the model, or this rank's parts of them.
    """
    wholes = [whole(parameter) for parameter in parameters]
    if any(map(is_sharded, wholes)) and not any(map(is_held_by_all, wholes)):
        raise ValueError(
            f"{type(owner).__name__}: its parameters have too few rows for the ranks that they are "
            "sharded over, some of which hold nothing: shard them over fewer, or not at all"
        )


def _parts(members: Iterable[Any]) -> Iterator[Any]:
    for member in members:
        named = isinstance(member, tuple)
        parameter = member[1] if named else member
        if not is_sharded(parameter):
            yield member
        else:
            part = _Part.of(parameter)
            yield (member[0], part) if named else part


class _Part(nn.Parameter):
    """What this rank holds of a DTensor.

    Attributes:
        whole: that DTensor.
        is_local: whether :attr:`grad` is of this part alone, or else that of the DTensor.
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
    """Return whether every rank that holds parts of a model holds some element of a parameter.

    The same on all ranks.
    """
    if not is_sharded(parameter):
        return bool(parameter.numel())
    shape = list(parameter.shape)
    for size, placement in zip(parameter.device_mesh.shape, parameter.placements, strict=True):
        if placement.is_shard():
            length = shape[placement.dim]
            # Chunks of equal length, of which the last is the shortest.
            shape[placement.dim] = max(0, length - (size - 1) * math.ceil(length / size))
    return bool(math.prod(shape))


def shard_groups(parameters: Iterable[torch.Tensor]) -> list[dist.ProcessGroup]:
    """Return the groups of ranks, this one among them, that hold the other parts of a model.

    Args:
        parameters: or this rank's parts of them, on one mesh.
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
    """Return the parameter of the model that this is the local part of; itself, if of none."""
    return parameter.whole if isinstance(parameter, _Part) else parameter


def like_whole(value: torch.Tensor, part: torch.Tensor) -> torch.Tensor:
    """Return values of a local part as what its parameter is: a DTensor, if that is one."""
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
    """Let local parts lie where their parameter does by now, and have their part of its gradient.

    For a while: else their gradient is the parameter's, a DTensor, by which ``GradScaler`` and
    ``clip_grad_norm_`` find the same on all ranks that share a model.

    Args:
        parameters: some of which may be parts.
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
    """Return the shape of a parameter; of a DTensor the size of an even part, as one dimension.

    The same on all ranks, though their parts may differ by a row.
    """
    if not is_sharded(parameter):
        return tuple(parameter.shape)
    parts = math.prod(
        size
        for size, placement in zip(parameter.device_mesh.shape, parameter.placements, strict=True)
        if placement.is_shard()
    )
    return (math.ceil(parameter.numel() / parts),)
