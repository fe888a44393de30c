"""What the figures say: one row per method with its seeds below it.

The same rows are printed in the terminal and written into the report.
"""

import re
from collections.abc import Callable
from dataclasses import dataclass

from rich.console import Console
from rich.text import Text

from benchmarks.lab import tables
from benchmarks.lab.clock import roughly
from benchmarks.lab.runs import Figures, Run
from benchmarks.report.conclusions import (
    is_distorted,
    is_worse,
    make_conclusions,
    make_warnings,
)
from benchmarks.report.groups import (
    Group,
    baseline_of,
    group_runs,
    mean_figures,
    seed_names,
)

_WIDE_CONSOLE = 110


@dataclass(frozen=True)
class Cell:
    """A cell as text, and what to sort it by: None where there is nothing to show."""

    text: str
    value: float | str | None


NOTHING = Cell("-", None)


@dataclass(frozen=True)
class Row:
    """A method's cells, one per column, and the rows of its seeds where there are several."""

    cells: tuple[Cell, ...]
    failed: bool = False
    worse_than_control: bool = False
    seeds: tuple["Row", ...] = ()


@dataclass(frozen=True)
class Table:
    """Rows, and the names of the columns in which at least one of them has something to show."""

    columns: tuple[str, ...]
    rows: list[Row]


@dataclass(frozen=True)
class _Line:
    """What the cells of one row are made of: a group's means or one of its runs."""

    name: str
    figures: Figures | None
    gap: float | None
    baseline: Figures | None
    note: str


def make_table(runs: list[Run]) -> Table:
    """Turn records into rows; columns in which no row has anything are left out."""
    groups = group_runs(runs)
    rows = [_make_row(group) for group in groups]
    lines = [line for row in rows for line in (row, *row.seeds)]
    kept = [
        i
        for i, (name, _) in enumerate(_COLUMNS)
        if name == "loss" or any(line.cells[i].value is not None for line in lines)
    ]

    def keep(row: Row) -> Row:
        cells = tuple(row.cells[i] for i in kept)
        seeds = tuple(map(keep, row.seeds))
        return Row(cells, row.failed, row.worse_than_control, seeds)

    return Table(tuple(_COLUMNS[i][0] for i in kept), list(map(keep, rows)))


def _make_row(group: Group) -> Row:
    failed = [run for run in group.runs if run.failure]
    notes = list(dict.fromkeys(run.note for run in group.runs if run.note))
    if group.figures is None:
        notes = list(dict.fromkeys(run.failure or "" for run in group.runs))
    elif failed:
        notes.append(f"{len(failed)} of {len(group.runs)} failed, the mean is of the others")
    line = _Line(
        group.name, group.figures, group.gap, mean_figures(group.baselines), "; ".join(notes)
    )
    worse = group.figures is not None and is_worse(group.figures, group.control)
    seeds = _seed_rows(group) if len(group.runs) > 1 else ()
    return Row(_make_cells(line), group.figures is None, worse, seeds)


def _seed_rows(group: Group) -> tuple[Row, ...]:
    rows = []
    for run, name in zip(group.runs, seed_names(group.runs), strict=True):
        baseline = baseline_of(run, group.baselines)
        gap = run.figures.loss - baseline.loss if run.figures and baseline else None
        line = _Line(name, run.figures, gap, baseline, run.failure or "")
        rows.append(Row(_make_cells(line), run.figures is None))
    return tuple(rows)


def _make_cells(line: _Line) -> tuple[Cell, ...]:
    return tuple(make(line) for _, make in _COLUMNS)


def _loss(line: _Line) -> Cell:
    if line.figures is None:
        return Cell("failed", None)
    return Cell(f"{line.figures.loss:.3f}", line.figures.loss)


def _gap(line: _Line) -> Cell:
    return NOTHING if line.gap is None else Cell(f"{line.gap:+.3f}", line.gap)


def _bytes(name: str) -> Callable[[_Line], Cell]:
    def cell(line: _Line) -> Cell:
        if line.figures is None:
            return NOTHING
        count = getattr(line.figures, name)
        return Cell(tables.format_bytes(count), count)

    return cell


def _ratio(line: _Line) -> Cell:
    own, other = line.figures, line.baseline
    if not own or not other or not own.sent_per_step or not other.sent_per_step:
        return NOTHING
    ratio = other.sent_per_step / own.sent_per_step
    return Cell(f"{ratio:.3g}x", ratio)


def _step_ms(line: _Line) -> Cell:
    figures = line.figures
    if figures is None:
        return NOTHING
    text = roughly(figures.step_ms) if is_distorted(figures) else f"{figures.step_ms:.0f}"
    return Cell(text, figures.step_ms)


def _drift(line: _Line) -> Cell:
    if line.figures is None or line.figures.drift is None:
        return NOTHING
    return Cell(f"{line.figures.drift:.2g}", line.figures.drift)


_COLUMNS: tuple[tuple[str, Callable[[_Line], Cell]], ...] = (
    ("method", lambda line: Cell(line.name, line.name)),
    ("loss", _loss),
    ("vs all-reduce", _gap),
    ("sent/step", _bytes("sent_per_step")),
    ("received/step", _bytes("received_per_step")),
    ("fewer bytes", _ratio),
    ("total sent", _bytes("bytes_sent")),
    ("ms/step", _step_ms),
    ("drift", _drift),
    ("note", lambda line: Cell(line.note, line.note or None)),
)


def print_table(runs: list[Run], console: Console) -> None:
    """Print the rows, and the conclusions below them."""
    table = make_table(runs)
    lines = [(line, line is not row) for row in table.rows for line in (row, *row.seeds)]
    has_notes = table.columns[-1] == "note"
    # Notes in a narrow column would be taller than the rest of the table together.
    is_wide = console.width >= _WIDE_CONSOLE or not has_notes
    columns = table.columns if is_wide else table.columns[:-1]
    # Broken where it is short: numbers of 80 columns leave no room for wide headers.
    headers = [
        name if name in tables.LEFT else re.sub(r"(?<=all-)|(?<=fewer|total) |(?=/)", "\n", name)
        for name in columns
    ]
    rows = [
        ["  " * is_seed + row.cells[0].text, *(cell.text for cell in row.cells[1 : len(columns)])]
        for row, is_seed in lines
    ]
    styles = [
        "red" if row.failed else "yellow" if row.worse_than_control else "dim" * is_seed
        for row, is_seed in lines
    ]
    shown = tables.make_table("", headers, rows, styles, whole=True)
    shown.padding = (0, int(is_wide), 0, 0)
    console.print(shown)
    console.print()
    if not is_wide:
        for row, _ in lines:
            if row.cells[-1].text:
                console.print(Text(f"{row.cells[0].text}: {row.cells[-1].text}"))
        console.print()
    for paragraph in make_warnings(runs):
        console.print(Text(f"* {paragraph}"), style="yellow")
    for paragraph in make_conclusions(runs):
        console.print(Text(f"* {paragraph}"))
