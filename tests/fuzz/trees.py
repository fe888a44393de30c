"""Mutations of what JSON or a checkpoint holds: dictionaries, lists, numbers, tensors."""

import copy
import math
from collections.abc import Iterator, MutableMapping, MutableSequence
from typing import Any

import torch

from tests.fuzz.fuzzing import Draw

PLAIN: tuple[Any, ...] = (
    *(None, True, False, 0, 1, -1, 2, 7, 2**31, 2**63, -(2**64), 10**400, 0.5, -0.5, 1e308, 1e-320),
    *(math.nan, math.inf, -math.inf, "", "x", "none", "auto", "topk", "error_feedback", "sample"),
    *([], {}, [1], ["x"], {"a": 1}, {"type": "error_feedback"}, {"type": {}}, [[[]]]),
)
TENSORS: tuple[Any, ...] = (
    *(b"x", (1,), {1}, object, torch.tensor(math.nan), torch.tensor(3), torch.zeros(0)),
    *(torch.ones(3), torch.ones(2, 2, dtype=torch.int64), torch.ones(5, dtype=torch.complex64)),
    *(torch.ones(2, dtype=torch.bool), torch.full((64,), math.inf), torch.ones(8, device="meta")),
)
_KEYS = ("x", "", 0, None, -1, "weight", "type")


def mutated(draw: Draw, tree: Any, values: tuple[Any, ...]) -> Any:
    """Return a copy of a tree with one to three things in it changed, if anything."""
    tree = copy.deepcopy(tree)
    for _ in range(draw.below(4)):
        places = list(_places(tree))
        if not places:
            return copy.deepcopy(draw.choice(values))
        container, key = draw.choice(places)
        how = draw.below(5)
        if how == 0:
            del container[key]
        elif how == 1 and isinstance(container, MutableMapping):
            container[draw.choice(_KEYS)] = container.pop(key)
        elif how == 2:  # what belongs elsewhere
            other, other_key = draw.choice(places)
            container[key] = copy.deepcopy(other[other_key])
        elif how == 3 and isinstance(container[key], torch.Tensor):
            container[key] = _other(container[key], draw.below(6))
        else:
            container[key] = copy.deepcopy(draw.choice(values))
    return tree


def _places(tree: Any) -> Iterator[tuple[Any, Any]]:
    """Yield each container with each of its keys, from the top down."""
    keys: list[Any] = []
    if isinstance(tree, MutableMapping):
        keys = list(tree)
    elif isinstance(tree, MutableSequence):
        keys = list(range(len(tree)))
    for key in keys:
        yield tree, key
        yield from _places(tree[key])


def _other(tensor: torch.Tensor, how: int) -> torch.Tensor:
    if how == 0:
        return tensor.double()
    if how == 1:
        return tensor.flatten()[: tensor.numel() // 2].clone()
    if how == 2:
        return tensor[None]
    if how == 3:
        return torch.cat([tensor.flatten(), tensor.flatten()])
    if how == 4:
        return tensor.to(torch.int32)
    if tensor.dtype.is_floating_point or tensor.is_complex():
        return torch.full_like(tensor, math.nan)
    return ~tensor
