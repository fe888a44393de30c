"""What the figures say: one row per method, and the conclusions below it.

The same rows and conclusions are printed in the terminal and written into the report.
"""

import re
from dataclasses import dataclass

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from comm_hooks.launchers.compare.runs import Figures, Run, figures_of

BASELINE = "all_reduce"
CONTROL = "none"
COLUMNS = (
    "method",
    "loss",
    "vs all-reduce",
    "sent/step",
    "received/step",
    "fewer bytes",
    "total sent",
    "ms/step",
    "drift",
    "note",
)
NOISE = 0.03
"""Differences in loss below this say nothing: another seed makes as much."""

_WIDE_CONSOLE = 110
_SLOW_LINK_BYTES_PER_SECOND = 100e6 / 8


@dataclass(frozen=True)
class Row:
    """One method's cells, as text, in the order of :data:`COLUMNS`."""

    cells: tuple[str, ...]
    failed: bool
    worse_than_control: bool


def make_rows(runs: list[Run]) -> list[Row]:
    """Turn records into rows."""
    baseline, control = figures_of(runs, BASELINE), figures_of(runs, CONTROL)
    return [_make_row(run, baseline, control) for run in runs]


def _make_row(run: Run, baseline: Figures | None, control: Figures | None) -> Row:
    figures = run.figures
    if figures is None:
        blanks = ("-",) * (len(COLUMNS) - 3)
        return Row((run.method, "failed", *blanks, run.failure or ""), True, False)
    ratio = "-"
    if baseline and baseline.sent_per_step and figures.sent_per_step:
        ratio = f"{baseline.sent_per_step / figures.sent_per_step:.3g}x"
    cells = (
        run.method,
        f"{figures.loss:.3f}",
        f"{figures.loss - baseline.loss:+.3f}" if baseline else "-",
        format_bytes(figures.sent_per_step),
        format_bytes(figures.received_per_step),
        ratio,
        format_bytes(figures.bytes_sent),
        f"{figures.step_ms:.0f}",
        f"{figures.drift:.2g}",
        run.note,
    )
    return Row(cells, False, _is_worse(figures, control))


def _is_worse(figures: Figures, control: Figures | None) -> bool:
    return control is not None and figures.loss > control.loss + NOISE


def format_bytes(count: float) -> str:
    """Return a count of bytes with three digits and a unit: ``83.1 kB``."""
    for unit in ("B", "kB", "MB", "GB"):
        if count < 999.5:
            return f"{count:.3g} {unit}"
        count /= 1000
    return f"{count:.0f} TB"


def make_conclusions(runs: list[Run]) -> list[str]:
    """Return what to make of the figures, one paragraph each."""
    finished = {run.method: run.figures for run in runs if run.figures}
    control = finished.get(CONTROL)
    warmup = runs[0].settings.warmup
    paragraphs = [
        "Loss is in nats per byte, on text of all ranks. Each rank trains on a part of its own, "
        "so what the others know reaches it over the wire or not at all; differences under "
        f"{NOISE} say nothing at one seed.",
        f"Bytes are those of one rank, per step after the {warmup} warm-up steps; the total has "
        "these, too. Drift is the largest relative distance between replicas: exactly 0 wherever "
        "all ranks apply the same update.",
    ]
    moved = {name: figures.sent_per_step for name, figures in finished.items()}
    compressed = {name: count for name, count in moved.items() if count > 0}
    if len(compressed) > 1:
        most, least = (pick(compressed, key=lambda n: compressed[n]) for pick in (max, min))
        paragraphs.append(
            "The milliseconds are those of this machine, where bytes cost next to nothing. On a "
            f"link of 100 Mbit/s the bytes of one step alone take {_link_ms(compressed[most])} ms "
            f"for {most} and {_link_ms(compressed[least])} ms for {least}."
        )
    worse = [name for name, figures in finished.items() if _is_worse(figures, control)]
    if worse:
        paragraphs.append(
            f"Worse than no communication at all: {', '.join(worse)}. This is no bug but a "
            "warning about the pair of what is compressed and which optimizer uses it. Under "
            "Adam, for instance, error feedback turns a gradient into rare pulses, to which the "
            "second moment answers with tiny steps; dividing before the exchange "
            "(local_variance_adam, local_adamw) avoids that. A method may also need more steps "
            "than these to pay off."
        )
    return paragraphs


def _link_ms(count: float) -> str:
    milliseconds = 1e3 * count / _SLOW_LINK_BYTES_PER_SECOND
    return f"{milliseconds:,.0f}" if milliseconds >= 10 else f"{milliseconds:.1f}"


def print_table(runs: list[Run], console: Console) -> None:
    """Print the rows, and the conclusions below them."""
    rows = make_rows(runs)
    # Notes in a narrow column would be taller than the rest of the table together.
    is_wide = console.width >= _WIDE_CONSOLE
    columns = COLUMNS if is_wide else COLUMNS[:-1]
    table = Table(box=box.SIMPLE_HEAD, padding=(0, int(is_wide), 0, 0), show_edge=False)
    for name in columns:
        if name in ("method", "note"):
            table.add_column(name, overflow="fold")
        else:
            # Broken where it is short: numbers of 80 columns leave no room for wide headers.
            header = re.sub(r"(?<=all-)|(?<=fewer|total) |(?=/)", "\n", name)
            table.add_column(header, justify="right", no_wrap=True)
    for row in rows:
        style = "red" if row.failed else "yellow" if row.worse_than_control else ""
        table.add_row(*(Text(cell) for cell in row.cells[: len(columns)]), style=style)
    console.print(table)
    console.print()
    if not is_wide:
        for row in rows:
            console.print(Text(f"{row.cells[0]}: {row.cells[-1]}"))
        console.print()
    for paragraph in make_conclusions(runs):
        console.print(Text(f"* {paragraph}"))
