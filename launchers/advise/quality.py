"""Measured quality of methods: the share of all-reduce's gain in loss that they keep."""

import functools
import inspect
import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from comm_hooks.launchers.advise.methods import Method, parse_method
from comm_hooks.optim import low_communication

FILE = Path(__file__).with_name("measured.json")
FEWEST_TASKS = 3
"""The smallest number of measured tasks on which a recommendation may be based."""


@dataclass(frozen=True)
class Cell:
    """The measured quality of a method in one setting, on several tasks.

    Attributes:
        method: the method, as ``comm-hooks advise --methods`` takes it.
        ranks: the number of ranks of the setting.
        tokens: the tokens of the training, all ranks together, per parameter of the model.
        batch: the samples per step and rank.
        seeds: the number of seeds per task; the fewest of all tasks.
        spread: half the distance between seeds, the largest of all tasks; 0 for a single seed.
        kept: by task, (none - method) / (none - all-reduce) in held-out loss, where all-reduce and
            training without exchange (none) have the method's own local steps.
        adamw: the same where both have AdamW.
    """

    method: str
    ranks: int
    tokens: float
    batch: int
    seeds: int
    spread: float
    kept: dict[str, float]
    adamw: dict[str, float]


@dataclass(frozen=True)
class Kept:
    """The range of the quality that a method kept, over tasks and settings.

    Args:
        cells: the measurements, one for each setting.
    """

    cells: Sequence[Cell]

    @property
    def lowest(self) -> float:
        return min(min(cell.kept.values()) for cell in self.cells)

    @property
    def of_adamw(self) -> str:
        """The range where the controls have AdamW."""
        return _in_percent(share for cell in self.cells for share in cell.adamw.values())

    def __str__(self) -> str:
        spread = 100 * max(cell.spread for cell in self.cells)
        text = _in_percent(share for cell in self.cells for share in cell.kept.values())
        return f"{text} ± {spread:.0f}" if spread else text


def _in_percent(shares: Iterable[float]) -> str:
    percents = [round(100 * share) for share in shares]
    low, high = min(percents), max(percents)
    return f"{low} %" if low == high else f"{low} to {high} %"


ALL = Kept([Cell("all_reduce", 0, 0.0, 0, 0, 0.0, {"any": 1.0}, {"any": 1.0})])
"""The quality of all-reduce itself."""


@functools.cache
def measured() -> Sequence[Cell]:
    """Return the measurements of ``python -m benchmarks.quality``."""
    return [Cell(**cell) for cell in json.loads(FILE.read_text())["cells"]]


def most_ranks() -> int:
    """Return the largest number of ranks measured on at least ``FEWEST_TASKS`` tasks."""
    return max(cell.ranks for cell in measured() if len(cell.kept) >= FEWEST_TASKS)


def kept_by(method: Method, ranks: int, cells: Iterable[Cell] | None = None) -> Kept | None:
    """Return the measured quality of a method with ``ranks`` ranks; None without a measurement.

    1. More ranks keep less, so the measurement with the fewest ranks, at least ``ranks``, counts.
    2. Trainings of all lengths and batch sizes count.
    3. A budget of ``low_communication`` is judged by the largest measured budget within it, because
       a larger budget is not always used up.
    4. A setting with fewer than three tasks does not count.

    Args:
        method: the method, with the options of the measurement, except for the budget.
        ranks: the number of ranks of the training.
        cells: the measurements, by default :func:`measured`.
    """
    if method.spec == "all_reduce":
        return ALL
    found = [
        cell
        for cell in (measured() if cells is None else cells)
        if cell.ranks >= ranks
        and len(cell.kept) >= FEWEST_TASKS
        and _without_budget(other := parse_method(cell.method)) == _without_budget(method)
        and _budget(other) <= _budget(method)
    ]
    ranks = min((cell.ranks for cell in found), default=ranks)
    found = [cell for cell in found if cell.ranks == ranks]
    best: dict[tuple[float, int], Cell] = {}
    for cell in sorted(found, key=lambda cell: _budget(parse_method(cell.method))):
        best[cell.tokens, cell.batch] = cell
    return Kept(list(best.values())) if best else None


def _without_budget(method: Method) -> tuple[object, ...]:
    *parts, options = method.parts
    return *parts, {k: v for k, v in options.items() if k != "bits_per_parameter"}


def _budget(method: Method) -> float:
    """Return the bits per parameter and step of ``low_communication``; 0 for other methods."""
    if method.optimizer != low_communication.__name__:
        return 0.0
    default = inspect.signature(low_communication).parameters["bits_per_parameter"].default
    return float(method.optimizer_options.get("bits_per_parameter", default))
