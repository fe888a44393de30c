"""What methods keep of what exchanging is worth, where that was measured."""

import functools
import inspect
import json
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.lab.methods import Method, parse_method
from benchmarks.lab.plain import rebuild
from benchmarks.lab.runs import BASELINE
from comm_hooks.optim import low_communication

FILE = Path(__file__).with_name("measured.json")
FEWEST_TASKS = 3
"""What fewer tasks say is no rule."""

_ALIKE = {"bf16": "identity:bits=16"}
"""Methods that send and add the same numbers."""


@dataclass(frozen=True)
class Situation:
    """What a training is like.

    Args:
        ranks: N.
        tokens: of training, all ranks together, per parameter of the model.  None: not known.
        batch: samples per step and rank.  None: not known.
    """

    ranks: int
    tokens: float | None = None
    batch: int | None = None


@dataclass(frozen=True)
class Cell:
    """A method in a setting, on several tasks.

    Args:
        method: as ``python -m benchmarks.compare --hooks`` takes it.
        ranks: of the setting.
        tokens: per parameter.
        batch: samples per step and rank.
        seeds: the fewest that a task has.
        spread: half the distance between seeds, the largest of all tasks; 0 for a single seed.
        kept: task -> (none - method) / (none - all-reduce), in held-out loss.
    """

    method: str
    ranks: int
    tokens: float
    batch: int
    seeds: int
    spread: float
    kept: dict[str, float]


@dataclass(frozen=True)
class Kept:
    """What a method keeps in a situation: the least and the most, over tasks and settings.

    Args:
        cells: the settings that stand for the situation.
    """

    cells: Sequence[Cell]

    @property
    def lowest(self) -> float:
        return min(min(cell.kept.values()) for cell in self.cells)

    @property
    def highest(self) -> float:
        return max(max(cell.kept.values()) for cell in self.cells)

    @property
    def spread(self) -> float:
        """Half the distance between seeds; 0 if each is of one."""
        return max(cell.spread for cell in self.cells)

    def __str__(self) -> str:
        low, high = round(100 * self.lowest), round(100 * self.highest)
        spread = f" ± {100 * self.spread:.0f}" if self.spread else ""
        return (f"{low} %" if low == high else f"{low} to {high} %") + spread


ALL = Kept([Cell(BASELINE, 0, 0.0, 0, 0, 0.0, {"any": 1.0})])
"""Of all-reduce itself."""


@functools.cache
def measured() -> Sequence[Cell]:
    """Return what ``python -m benchmarks.quality`` has found."""
    return [rebuild(Cell, cell) for cell in json.loads(FILE.read_text())["cells"]]


def most_ranks(cells: Iterable[Cell] | None = None) -> int:
    """Return the most ranks that something was measured with on enough tasks."""
    cells = measured() if cells is None else cells
    return max((cell.ranks for cell in cells if len(cell.kept) >= FEWEST_TASKS), default=0)


def kept_by(
    method: Method, situation: Situation, cells: Iterable[Cell] | None = None
) -> Kept | None:
    """Return what a method keeps, by the rule below; None if nothing measured says so.

    1. More ranks keep less: the fewest ranks measured count that are no fewer than those asked for.
       For more than were ever measured nothing is known.
    2. Of lengths and batches the nearest (by their logarithm) counts.  Where the situation does not
       say, all do.
    3. A budget of ``low_communication`` is judged by the largest measured that it covers: more is
       not used up.
    4. A setting with fewer than three tasks says nothing.

    Args:
        method: with exactly these options, but for the budget.
        situation: the user's training.
        cells: what was measured; by default :func:`measured`.

    Example::

        >>> from benchmarks.lab.methods import parse_method
        >>> print(kept_by(parse_method("all_reduce"), Situation(ranks=4)))
        100 %
        >>> kept_by(parse_method("low_communication"), Situation(ranks=1000)) is None
        True
    """
    if method.crossing == BASELINE and method.optimizer == "adamw":
        return ALL
    method = parse_method(_ALIKE.get(method.spec, method.spec))
    found = [
        cell
        for cell in (measured() if cells is None else cells)
        if cell.ranks >= situation.ranks
        and len(cell.kept) >= FEWEST_TASKS
        and _covers(method, parse_method(cell.method))
    ]
    found = _nearest(found, lambda cell: cell.ranks, situation.ranks)
    if situation.tokens is not None:
        found = _nearest(found, lambda cell: cell.tokens, situation.tokens)
    if situation.batch is not None:
        found = _nearest(found, lambda cell: cell.batch, situation.batch)
    best: dict[tuple[float, int], Cell] = {}
    for cell in sorted(found, key=lambda cell: _budget(parse_method(cell.method))):
        best[cell.tokens, cell.batch] = cell
    return Kept(list(best.values())) if best else None


def _nearest(cells: list[Cell], size: Callable[[Cell], float], wanted: float) -> list[Cell]:
    """Return the cells of the one size that is nearest."""
    if not cells:
        return []
    nearest = min(map(size, cells), key=lambda s: abs(math.log(s) - math.log(wanted)))
    return [cell for cell in cells if size(cell) == nearest]


def _covers(method: Method, other: Method) -> bool:
    """Return whether they are the same, however written, and the first may send as many bits."""
    return _parts(method) == _parts(other) and _budget(method) >= _budget(other)


def _parts(method: Method) -> tuple[Any, ...]:
    options = {k: v for k, v in method.optimizer_options.items() if k != "bits"}
    return method.crossing, method.crossing_options, method.optimizer, options


def _budget(method: Method) -> float:
    """Return the bits per parameter and step of ``low_communication``; 0 of all else."""
    if method.optimizer != low_communication.__name__:
        return 0.0
    default = inspect.signature(low_communication).parameters["bits_per_parameter"].default
    return float(method.optimizer_options.get("bits", default))
