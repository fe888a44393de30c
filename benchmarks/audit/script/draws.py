"""The samples of each step, and a planted one."""

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import torch
from torch.utils import _pytree as pytree
from torch.utils.data import ConcatDataset, Subset

from comm_hooks.optim.private.data.poisson import PoissonLoader, PoissonSampler
from comm_hooks.optim.private.data.rows import require_once
from comm_hooks.optim.private.data.tickets import Ticket, Tickets
from comm_hooks.optim.private.random_states import random_states_kept

Kind = Literal["absent", "huge", "swapped", "not finite"]
# Factors of the values: gradients are far above any bound, and their squares finite.
# Those that read one sample at a time, although they offer to read several.
_KNOWN = (Subset, ConcatDataset)
EXTREMES: dict[str, float] = {"huge": 1e6, "swapped": 1e6, "not finite": float("nan")}


@dataclass(frozen=True)
class Plant:
    """A change of one sample, or of one in every batch.

    Attributes:
        index: of the sample in the data set (or of the client); None: of each batch another one,
            the last, the first, or any, on one rank after the other.
        kind: ``"absent"``: it is in no batch, and another sample takes its place in the data set;
            ``"huge"``: its values (of a client: its message) are multiplied by a million;
            ``"swapped"``: it also has the labels of another sample, so that it is wrong where the
            other is right; ``"not finite"``: its values are NaN.
    """

    index: int | None
    kind: Kind

    def name(self, unit: str) -> str:
        """Return the name of the sample (or client) for messages."""
        return f"one {unit} of a batch" if self.index is None else f"{unit} {self.index}"

    def place(self, step: int, drawn: Sequence[int]) -> int | None:
        """Return the place of the changed sample among those of a batch; None for none."""
        if self.index is not None:
            return drawn.index(self.index) if self.index in drawn else None
        return (-1, 0, step * step)[step % 3] % len(drawn) if drawn else None


class Draws:
    """Follows batches from the sampler to the step, and plants a sample on their way.

    Args:
        planted: the sample; None for none.
        seed: sets the generators.

    Samples that are random are the same in all runs: the generators are set for each reading, by
    its index and the number of steps.  A data set that reads several samples together is left as
    it is.

    Attributes:
        observers: by event; see :mod:`benchmarks.audit.events`.
    """

    def __init__(self, planted: Plant | None, seed: Callable[[int], None]) -> None:
        self._planted, self._seed = planted, seed
        self._steps = 0
        # By the id of a data set, which is kept alive.
        self._edits: dict[int, tuple[Any, Callable[[int, Any], Any]]] = {}
        # By the sampler and the tickets of a loader: its rank, the number of ranks, and the
        # samples of its pending batches, as indices of the whole data set.
        self._waiting: dict[object, tuple[int, int, deque[list[int]]]] = {}
        self._batches: dict[object, int] = {}
        self._drawn_for: dict[Ticket, list[int]] = {}
        self._drawn: list[int] | None = None
        self.observers: dict[str, Callable[..., Any]] = {
            "loader": self._make_loader,
            "draw": self._draw,
            "iteration": self._start_iteration,
            "batch": self._issue,
            "step": self._spend,
        }

    def take(self) -> list[int] | None:
        """Return the samples of the current step; None if they are not known."""
        drawn, self._drawn = self._drawn, None
        return drawn

    def _make_loader(
        self,
        method: Callable[..., None],
        loader: PoissonLoader,
        dataset: Any,
        *args: Any,
        rank: int = 0,
        world_size: int = 1,
        **options: Any,
    ) -> None:
        edit: Callable[[int, Any], Any] = _unchanged
        planted = self._planted
        if planted is not None and (planted.index is None or planted.index < len(dataset)):
            if id(dataset) not in self._edits:
                self._edits[id(dataset)] = dataset, plant(dataset, planted)
            edit = self._edits[id(dataset)][1]
        require_once(dataset)
        if planted is not None or type(dataset) in _KNOWN or not _reads_several(dataset):
            dataset = _Edited(dataset, edit, self._seed_of)
        method(loader, dataset, *args, rank=rank, world_size=world_size, **options)
        vars(loader.dataset)["indices"] = _Indices(vars(loader.dataset)["indices"])
        waiting: tuple[int, int, deque[list[int]]] = (rank, world_size, deque())
        self._waiting[loader.batch_sampler] = self._waiting[loader.tickets] = waiting

    def _draw(self, method: Callable[..., list[int]], sampler: PoissonSampler) -> list[int]:
        indices = method(sampler)
        if sampler not in self._waiting:
            return indices
        rank, world_size, waiting = self._waiting[sampler]
        drawn = [rank + i * world_size for i in indices]
        waiting.append(drawn)
        self._batches[sampler] = number = self._batches.get(sampler, 0) + 1
        planted = self._planted
        if planted is None or (planted.index is None and number % world_size != rank):
            return indices
        place = planted.place(number // world_size, drawn)
        if place is None:
            return indices
        left, index, right = indices[:place], indices[place], indices[place + 1 :]
        if planted.kind == "absent":
            return left + right
        return [*left, ~index, *right] if planted.index is None else indices

    def _start_iteration(self, method: Callable[..., None], tickets: Tickets) -> None:
        method(tickets)
        if tickets in self._waiting:
            self._waiting[tickets][2].clear()

    def _issue(
        self, method: Callable[..., Ticket], tickets: Tickets, batch: Any, read: Any = None
    ) -> Ticket:
        ticket = method(tickets, batch, read)
        if tickets in self._waiting:
            waiting = self._waiting[tickets][2]
            self._drawn_for[ticket] = waiting.popleft() if waiting else []
        return ticket

    def _seed_of(self, index: int) -> None:
        self._seed((1_000_003 * (self._steps + 1) + index) % (1 << 31))

    def _spend(self, method: Callable[..., None], tickets: Tickets, ticket: Ticket) -> None:
        self._steps += 1
        self._drawn = self._drawn_for.get(ticket)
        method(tickets, ticket)


class _Indices:
    """A rank's indices of a data set: ``~i`` stands for a change of the i-th of them."""

    def __init__(self, indices: Sequence[int]) -> None:
        self._indices = indices

    def __len__(self) -> int:
        return len(self._indices)

    def __getitem__(self, place: int) -> int:
        return self._indices[place] if place >= 0 else ~self._indices[~place]


class _Edited:
    """A data set with changed samples, which are the same at each reading in a step.

    ``~i`` is the changed sample i, where not all of its readings are changed.
    """

    def __init__(
        self, dataset: Any, edit: Callable[[int, Any], Any], seed: Callable[[int], None]
    ) -> None:
        self._dataset, self._edit, self._seed = dataset, edit, seed

    def __len__(self) -> int:
        return len(self._dataset)

    def __getitem__(self, index: int) -> Any:
        own = max(index, ~index)
        with random_states_kept():
            self._seed(own)
            return self._edit(index, self._dataset[own])


def _unchanged(index: int, sample: Any) -> Any:
    return sample


def _reads_several(dataset: Any) -> bool:
    return hasattr(dataset, "__getitems__")


def plant(dataset: Any, planted: Plant) -> Callable[[int, Any], Any]:
    """Change a sample of a data set, in its storage if possible.

    Returns:
        A function of an index and a sample, which returns the changed sample; the sample itself
        where the storage was changed.
    """
    index, kind = planted.index, planted.kind
    if index is None:
        return lambda at, own: own if at >= 0 else _edited(own, _other(dataset, ~at), kind)
    other = _other(dataset, index)
    if _plant_in_storage(dataset, index, other, kind):
        return _unchanged
    return lambda at, sample: _edited(sample, other, kind) if at == index else sample


def _other(dataset: Any, index: int) -> Any:
    """Return another sample of a data set, if possible with other labels."""
    own = _whole_numbers(dataset[index])
    other = dataset[index]
    for distance in range(1, min(len(dataset), 32)):
        other = dataset[(index + distance) % len(dataset)]
        if _whole_numbers(other) != own:
            break
    return pytree.tree_map(lambda x: x.clone() if isinstance(x, torch.Tensor) else x, other)


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
