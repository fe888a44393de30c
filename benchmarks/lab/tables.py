"""Tables for terminals and Markdown, and their cells."""

import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TypeVar

from rich import box
from rich.table import Table
from rich.text import Text

from benchmarks.lab.outcomes import Outcome

LEFT = ("method", "note", "partition")
"""Columns of words; the others hold numbers."""

TITLE = "Sent: bytes per client and round; held-out error; *: the largest or smallest rate tried"

Item = TypeVar("Item")
Cell = Callable[[Outcome], str]
Columns = Mapping[str, Cell]
"""The cells of a column, by its name."""


def make_table(
    title: str,
    columns: Sequence[str],
    rows: Iterable[Sequence[str]],
    styles: Iterable[str] = (),
    *,
    whole: bool = False,
) -> Table:
    """Return a table; an empty row is a line.

    Args:
        title: above it, or empty.
        columns: their names.
        rows: of cells.
        styles: the colour of each row; none by default.
        whole: whether numbers are never broken, however narrow the terminal.
    """
    table = Table(
        title=title or None,
        title_justify="left",
        box=box.SIMPLE_HEAD,
        padding=(0, 1, 0, 0),
        show_edge=False,
    )
    for name in columns:
        if name in LEFT:
            table.add_column(name, overflow="fold")
        else:
            table.add_column(
                name, justify="right", overflow="ellipsis" if whole else "fold", no_wrap=whole
            )
    looks = iter(styles)
    for row in rows:
        if row:
            table.add_row(*map(Text, row), style=next(looks, ""))
        else:
            table.add_section()
    return table


def tabulate(
    title: str,
    columns: Mapping[str, Callable[[Item], str]],
    items: Sequence[Item],
    section: Callable[[Item], object],
) -> Table:
    """Return the table with a row for each of the items, and a line where ``section`` changes."""
    rows: list[Sequence[str]] = []
    for before, item in zip([items[0], *items], items, strict=False):
        if section(before) != section(item):
            rows.append(())
        rows.append([cell(item) for cell in columns.values()])
    return make_table(title, list(columns), rows)


def markdown(columns: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    """Return the lines of a Markdown table.

    Example::

        >>> markdown(["method", "loss"], [["a|b", "1"]])
        ['| method | loss |', '| --- | --- |', '| a\\\\|b | 1 |']
    """
    lines = [columns, ["---"] * len(columns), *rows]
    return [
        f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in line)} |" for line in lines
    ]


def format_bytes(count: float) -> str:
    """Return a count of bytes with three digits and a unit: ``83.1 kB``."""
    for unit in ("B", "kB", "MB", "GB"):
        if count < 999.5:
            return f"{count:.3g} {unit}"
        count /= 1000
    return f"{count:.0f} TB"


def sent(outcome: Outcome) -> str:
    """Return the bytes of a round."""
    return format_bytes(outcome.bytes_per_round)


def fewer(full: float) -> Callable[[Outcome], str]:
    """Return the column of how many times fewer bytes than ``full`` are sent."""

    def cell(outcome: Outcome) -> str:
        if not full or not outcome.bytes_per_round:
            return "-"
        times = full / outcome.bytes_per_round
        return f"{times:,.0f}x" if times >= 100 else f"{times:.3g}x"

    return cell


def learning_rate(outcome: Outcome) -> str:
    """Return the best learning rate, with a star if others beyond it may be better."""
    return f"{outcome.settings['lr']:.2g}" + ("*" if outcome.is_at_edge else "")


def setting(name: str) -> Callable[[Outcome], str]:
    """Return the column of a setting that not all methods have."""
    return lambda o: f"{o.settings[name]:g}" if name in o.settings else "-"


def other_settings(outcome: Outcome) -> str:
    """Return what was tuned beside the learning rate."""
    others = {key: value for key, value in outcome.settings.items() if key != "lr"}
    return ", ".join(f"{key} {value:g}" for key, value in others.items()) or "-"


def label(name: str) -> Callable[[Outcome], str]:
    """Return the column of a label; numbers short, a dash for None."""

    def cell(outcome: Outcome) -> str:
        value = outcome.labels[name]
        return "-" if value is None else f"{value:g}" if isinstance(value, float) else str(value)

    return cell


def mean_error(outcome: Outcome) -> str:
    """Return the mean error in percent."""
    if outcome.diverged and len(outcome.runs) == 1:
        return "diverged"
    return f"{100 * statistics.mean(outcome.errors):.2f}"


def each_error(outcome: Outcome) -> str:
    """Return the error of each seed in percent."""
    if outcome.diverged and len(outcome.runs) == 1:
        return "-"
    return " ".join(f"{100 * error:.2f}" for error in outcome.errors)


def mean_loss(outcome: Outcome) -> str:
    """Return the mean loss."""
    return "-" if outcome.diverged else f"{statistics.mean(outcome.losses):.3f}"


JUDGED: Columns = {"error %": mean_error, "each seed": each_error, "loss": mean_loss}
"""What became of the held-out data."""
