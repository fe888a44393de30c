"""Cells of tables: means with what each seed gave."""

import statistics
from collections.abc import Sequence

from rich import box
from rich.table import Table
from rich.text import Text

from benchmarks.studies.runs import Outcome

LEFT = ("method", "note", "partition")
"""Columns of words; the others hold numbers."""


TITLE = "Sent: bytes per client and round; held-out error; *: the largest or smallest rate tried"


def make_table(title: str, columns: Sequence[str], rows: Sequence[Sequence[str]]) -> Table:
    """Return a table; an empty row is a line."""
    table = Table(
        title=title,
        title_justify="left",
        box=box.SIMPLE_HEAD,
        padding=(0, 1, 0, 0),
        show_edge=False,
    )
    for name in columns:
        table.add_column(name, justify="left" if name in LEFT else "right", overflow="fold")
    for row in rows:
        if row:
            table.add_row(*(Text(cell) for cell in row))
        else:
            table.add_section()
    return table


def fewer(full: float, sent: float) -> str:
    """Return how many times fewer bytes are sent."""
    if not full or not sent:
        return "-"
    times = full / sent
    return f"{times:,.0f}x" if times >= 100 else f"{times:.3g}x"


def percent(values: Sequence[float]) -> tuple[str, str]:
    """Return the mean of shares in percent, and each of them."""
    return f"{100 * statistics.mean(values):.2f}", " ".join(f"{100 * v:.2f}" for v in values)


def learning_rate(outcome: Outcome) -> str:
    """Return the best learning rate, with a star if others beyond it may be better."""
    return f"{outcome.settings['lr']:.2g}" + ("*" if outcome.is_at_edge else "")


def errors(outcome: Outcome) -> tuple[str, str]:
    """Return the mean error in percent, and that of each seed."""
    if outcome.diverged and len(outcome.runs) == 1:
        return "diverged", "-"
    return percent(outcome.errors)


def loss(outcome: Outcome) -> str:
    """Return the mean loss."""
    return "-" if outcome.diverged else f"{statistics.mean(outcome.losses):.3f}"
