"""A check that no row of a data set is in it twice."""

from collections.abc import Iterator
from typing import Any

import numpy as np
from torch.utils.data import ConcatDataset, Dataset, Subset


def require_once(dataset: Dataset[Any]) -> None:
    """Raise ``ValueError`` if a part of a data set, or a sum of several, has a row twice.

    A person in two rows counts twice in every step, and epsilon is for one.

    Not detected: equal rows at two places, and rows that a data set of another class repeats.
    """
    if type(dataset) not in (Subset, ConcatDataset):
        return
    known: dict[int, list[np.ndarray]] = {}
    sources: dict[int, Dataset[Any]] = {}
    for source, rows in _parts(dataset, np.arange(len(dataset))):  # type: ignore[arg-type]
        sources[id(source)] = source
        known.setdefault(id(source), []).append(rows)
    for key, parts in known.items():
        rows, counts = np.unique(np.concatenate(parts), return_counts=True)
        if len(rows) and counts.max() > 1:
            raise ValueError(
                f"the data set has row {rows[counts.argmax()]} of a {type(sources[key]).__name__} "
                f"{counts.max()} times, so that one sample counts more than once in a step: take "
                "every row once. If rows are not what is to be protected, write a Dataset that "
                "repeats them"
            )


def _parts(dataset: Dataset[Any], rows: np.ndarray) -> Iterator[tuple[Dataset[Any], np.ndarray]]:
    """Yield the data sets that rows come from, with their rows in them."""
    if type(dataset) is Subset:
        indices = np.asarray(dataset.indices)
        yield from _parts(dataset.dataset, indices[rows])
    elif type(dataset) is ConcatDataset:
        ends = np.asarray(dataset.cumulative_sizes)
        rows = np.where(rows < 0, rows + ends[-1], rows)
        places = np.searchsorted(ends, rows, side="right")
        for place, part in enumerate(dataset.datasets):
            own = rows[places == place] - (ends[place - 1] if place else 0)
            yield from _parts(part, own)
    else:
        size = len(dataset)  # type: ignore[arg-type]
        yield dataset, np.where(rows < 0, rows + size, rows)
