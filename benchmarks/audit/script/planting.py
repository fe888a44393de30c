"""One sample of a data set, made extreme or taken away, as two neighbouring data sets have it."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import torch
from torch.utils import _pytree as pytree
from torch.utils.data import Subset

Kind = Literal["absent", "huge", "swapped", "not finite"]
# What values are multiplied by: gradients are then far above any bound, and their squares finite.
EXTREMES: dict[str, float] = {"huge": 1e6, "swapped": 1e6, "not finite": float("nan")}


@dataclass(frozen=True)
class Plant:
    """A sample and what it is.

    Attributes:
        index: of the sample in the data set (or of the client).
        kind: ``"absent"``: it is never in a batch, and another stands in its place in the data set;
            ``"huge"``: its values (of a client: what it sends) are multiplied by a million;
            ``"swapped"``: it has the labels of another one, too, so that it is wrong where the
            other is right; ``"not finite"``: its values are NaN.
    """

    index: int
    kind: Kind


def plant(dataset: Any, planted: Plant) -> Callable[[int, Any], Any]:
    """Change a sample of a data set where it is stored.

    Returns:
        What makes of an index and a sample what the loader is to get: the sample itself, where it
        could be changed in its place.
    """
    other = _other(dataset, planted)

    def edited(index: int, sample: Any) -> Any:
        return _edited(sample, other, planted.kind) if index == planted.index else sample

    if _plant_in_storage(dataset, planted.index, other, planted.kind):
        return lambda index, sample: sample
    return edited


def _other(dataset: Any, planted: Plant) -> Any:
    """Return another sample, if there is one with other labels."""
    own = _whole_numbers(dataset[planted.index])
    other = dataset[planted.index]
    for distance in range(1, min(len(dataset), 32)):
        other = dataset[(planted.index + distance) % len(dataset)]
        if _whole_numbers(other) != own:
            break
    return pytree.tree_map(lambda x: x.clone() if isinstance(x, torch.Tensor) else x, other)


def _whole_numbers(sample: Any) -> list[Any]:
    leaves = [np.asarray(leaf) for leaf in pytree.tree_leaves(sample) if _is_number(leaf)]
    return [leaf.tolist() for leaf in leaves if leaf.dtype.kind in "iub"]


def _is_number(leaf: Any) -> bool:
    return isinstance(leaf, torch.Tensor | np.ndarray | np.generic | int | float)


def _edited(sample: Any, other: Any, kind: Kind) -> Any:
    leaves, structure = pytree.tree_flatten(sample)
    others = pytree.tree_leaves(other)
    if len(others) != len(leaves):
        others = leaves
    changed = [_edited_leaf(a, b, kind) for a, b in zip(leaves, others, strict=True)]
    return pytree.tree_unflatten(changed, structure)


def _edited_leaf(leaf: Any, other: Any, kind: Kind) -> Any:
    if kind == "absent":
        return other
    if isinstance(leaf, torch.Tensor):
        is_real = leaf.is_floating_point()
    elif isinstance(leaf, np.ndarray | np.generic):
        is_real = leaf.dtype.kind == "f"
    else:
        is_real = isinstance(leaf, float)
    if not is_real:
        return other if kind == "swapped" else leaf
    return leaf * EXTREMES[kind]


def _plant_in_storage(dataset: Any, index: int, other: Any, kind: Kind) -> bool:
    """Write to the tensors and arrays of a data set, row by row; return whether it has some."""
    if isinstance(dataset, Subset):
        return _plant_in_storage(dataset.dataset, int(dataset.indices[index]), other, kind)
    stored = getattr(dataset, "tensors", None)
    whole = dataset[index]
    if not isinstance(stored, tuple) or not isinstance(whole, tuple) or len(whole) != len(stored):
        return False
    if len(pytree.tree_leaves(other)) != len(stored):
        return False
    # Only where a sample is nothing but the rows: else a change in storage is another one there.
    for tensor, leaf in zip(stored, whole, strict=True):
        if not isinstance(leaf, torch.Tensor) or len(tensor) != len(dataset):
            return False
        if not torch.equal(tensor[index], leaf):
            return False
    with torch.no_grad():
        for tensor, row in zip(stored, _edited(whole, other, kind), strict=True):
            tensor[index] = row
    return True
