"""One sample of a data set, made extreme or taken away: two neighbouring data sets."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import torch
from torch.utils import _pytree as pytree
from torch.utils.data import Subset

Kind = Literal["absent", "huge", "swapped", "not finite"]
# Factors of the values: gradients are far above any bound, and their squares finite.
EXTREMES: dict[str, float] = {"huge": 1e6, "swapped": 1e6, "not finite": float("nan")}


@dataclass(frozen=True)
class Plant:
    """A change of one sample.

    Attributes:
        index: of the sample in the data set (or of the client).
        kind: ``"absent"``: it is in no batch, and another sample takes its place in the data set;
            ``"huge"``: its values (of a client: its message) are multiplied by a million;
            ``"swapped"``: it also has the labels of another sample, so that it is wrong where the
            other is right; ``"not finite"``: its values are NaN.
    """

    index: int
    kind: Kind


def plant(dataset: Any, planted: Plant) -> Callable[[int, Any], Any]:
    """Change a sample of a data set, in its storage if possible.

    Returns:
        A function of an index and a sample, which returns the changed sample; the sample itself
        where the storage was changed.
    """
    index, kind = planted.index, planted.kind
    own = _whole_numbers(dataset[index])
    other = dataset[index]
    for distance in range(1, min(len(dataset), 32)):
        other = dataset[(index + distance) % len(dataset)]
        if _whole_numbers(other) != own:
            break
    other = pytree.tree_map(lambda x: x.clone() if isinstance(x, torch.Tensor) else x, other)
    if _plant_in_storage(dataset, index, other, kind):
        return lambda index, sample: sample
    return lambda at, sample: _edited(sample, other, kind) if at == index else sample


def _whole_numbers(sample: Any) -> list[Any]:
    numbers = (torch.Tensor, np.ndarray, np.generic, int, float)
    leaves = [np.asarray(x) for x in pytree.tree_leaves(sample) if isinstance(x, numbers)]
    return [leaf.tolist() for leaf in leaves if leaf.dtype.kind in "iub"]


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
    if isinstance(leaf, torch.Tensor | np.ndarray | np.generic):
        is_real = "float" in str(leaf.dtype)
    else:
        is_real = isinstance(leaf, float)
    if not is_real:
        return other if kind == "swapped" else leaf
    return leaf * EXTREMES[kind]


def _plant_in_storage(dataset: Any, index: int, other: Any, kind: Kind) -> bool:
    """Write to the tensors of a data set, row by row; return whether it has some."""
    if isinstance(dataset, Subset):
        return _plant_in_storage(dataset.dataset, int(dataset.indices[index]), other, kind)
    stored, whole = getattr(dataset, "tensors", None), dataset[index]
    if not isinstance(stored, tuple) or not isinstance(whole, tuple):
        return False
    if not len(whole) == len(stored) == len(pytree.tree_leaves(other)):
        return False
    # Only if the sample is exactly the rows: else a change in storage is another one there.
    for tensor, leaf in zip(stored, whole, strict=True):
        if not isinstance(leaf, torch.Tensor) or len(tensor) != len(dataset):
            return False
        if not torch.equal(tensor[index], leaf):
            return False
    with torch.no_grad():
        for tensor, row in zip(stored, _edited(whole, other, kind), strict=True):
            tensor[index] = row
    return True
