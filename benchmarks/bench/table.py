"""The table, on the screen and as Markdown, and what a reader must know to judge it."""

import statistics
from collections.abc import Iterator
from pathlib import Path

from rich.console import Console
from rich.text import Text

from benchmarks.bench.rates import UNSHAPED, bits_per_second, show_bits, show_rate
from benchmarks.bench.results import Bench, Result, Timing, moved_at
from benchmarks.bench.waits import halfway_loss, steps_until
from benchmarks.lab.runs import CONTROL
from benchmarks.lab.tables import format_bytes, make_table, markdown

# Of a cap, an all-reduce over TCP reaches 82 to 95 %.
_LEAST_SHARE_OF_CAP = 0.7
# The control's steps vary by a tenth or so on a quiet machine.
_MOST_SPREAD = 1.3
_NOTHING = "-"


def rows_of(results: list[Result], rates: list[str]) -> list[list[str]]:
    """Return of each method its name, loss, bytes per step, and times at all rates."""
    return [_row(result, rates) for result in results]


def _row(result: Result, rates: list[str]) -> list[str]:
    slowest = result.timings[-1] if result.timings else None
    return [
        result.run.method,
        f"{result.run.figures.loss:.3f}" if result.run.figures else "failed",
        format_bytes(slowest.counted_bytes) if slowest else _NOTHING,
        format_bytes(slowest.interface_bytes) if slowest else _NOTHING,
        *(_time(result.at(rate)) for rate in rates),
    ]


def _time(timing: Timing | None) -> str:
    if timing is None:
        return _NOTHING
    return f"{timing.best.milliseconds:,.0f} ({timing.ratio:.2f})"


def wait_rows_of(results: list[Result], rates: list[str], loss: float) -> list[list[str]]:
    """Return how many steps, and seconds at each rate, each method takes to a loss.

    A step takes as long as a step without exchange usually did, and what the exchange took on top
    of the control of the same run: another method may have been timed at a busier time.
    """
    controls = [t.control.milliseconds for result in results for t in result.timings]
    usual = statistics.median(controls) if controls else 0.0
    rows = []
    for result in results:
        steps = steps_until(loss, result.run.curve)
        cells = [_NOTHING] * (1 + len(rates))
        if steps is not None:
            seconds = (
                steps * (usual + t.best.milliseconds - t.control.milliseconds) / 1e3 if t else None
                for t in map(result.at, rates)
            )
            cells = [_count(steps), *map(_count, seconds)]
        rows.append([result.run.method, *cells])
    return rows


def _count(number: float | None) -> str:
    return _NOTHING if number is None else f"{number:,.0f}"


def make_notes(results: list[Result], rates: list[str]) -> list[str]:
    """Return what a reader must know to judge the figures, one paragraph each."""
    return [*_warnings(results, rates), *_explanations(results)]


def _warnings(results: list[Result], rates: list[str]) -> list[str]:
    failed = (result for result in results if result.run.failure)
    found = [f"{result.run.method} failed: {result.run.failure}" for result in failed]
    controls = [t.control.milliseconds for result in results for t in result.timings]
    if controls and max(controls) > _MOST_SPREAD * min(controls):
        found.append(
            f"A step without exchange took from {min(controls):,.0f} to {max(controls):,.0f} ms: "
            "the machine did other work as well. That lengthens computing and not sending, so "
            "ratios on slow links come out too small; run it again on a quiet machine."
        )
    for rate in rates:
        cap, moved = bits_per_second(rate), moved_at(results, rate)
        if cap and moved and moved < _LEAST_SHARE_OF_CAP * cap:
            found.append(
                f"{show_rate(rate)} is more than this machine moves: an all-reduce got "
                f"{show_bits(moved)} through at best, so that column measures the machine."
            )
    return found


def _explanations(results: list[Result]) -> list[str]:
    found = [
        "Under each rate: milliseconds per step, and in brackets how many times as long that is as "
        "a step that exchanges nothing. Both took turns in the same run, since machines are busy "
        "at some times and not at others: compare the ratios. Means over whole periods of methods "
        "with local steps; medians of those.",
        "Bytes are those that one rank sends per step over the slowest link: by the method's own "
        "count, and on the wire with headers and acknowledgements, as the network interface counts "
        "them.",
        "Loss is in nats per byte, on text of all ranks, after a training over links without a "
        "cap; the rate does not change it. Between the points at which it is measured it is "
        "interpolated, and seconds are steps times the time of a step.",
    ]
    control = next((result for result in results if result.run.method == CONTROL), None)
    if control and control.timings:
        ratios = [timing.ratio for timing in control.timings]
        found.append(
            f"No exchange against itself: {min(ratios):.2f} to {max(ratios):.2f}. Differences of "
            "that size say nothing."
        )
    sizes = [
        f"{result.run.method}, {show_rate(timing.rate)}: {timing.best.bucket_mb} MB"
        for result in results
        for timing in result.timings
        if timing.best.bucket_mb is not None
    ]
    if sizes:
        found.append(
            f"Of DDP's bucket sizes the fastest at each rate is shown: {'; '.join(sizes)}."
        )
    moved = moved_at(results, UNSHAPED)
    if moved:
        found.append(f"Unshaped, an all-reduce moves {show_bits(moved)} from each rank.")
    return found


def print_table(results: list[Result], rates: list[str], console: Console) -> None:
    """Print the tables, and the notes below them."""
    for title, columns, rows in _tables(results, rates):
        if title:
            console.print(Text(title))
        # Broken where it is short: the figures below leave no room for wide headers.
        headers = [columns[0], *("\n".join(name.rsplit(" ", 1)) for name in columns[1:])]
        styles = ["red" if result.run.failure else "" for result in results]
        console.print(make_table("", headers, rows, styles, whole=True))
        console.print()
    warnings = _warnings(results, rates)
    for note in make_notes(results, rates):
        console.print(Text(f"* {note}"), style="yellow" if note in warnings else "")


def _tables(
    results: list[Result], rates: list[str]
) -> Iterator[tuple[str, list[str], list[list[str]]]]:
    """Yield the title, the columns and the rows of each table."""
    links = [*map(show_rate, rates)]
    columns = ["method", "loss", "sent/step", "on the wire", *links]
    yield "", columns, rows_of(results, rates)
    loss = halfway_loss(results)
    if loss is not None:
        title = (
            f"Seconds of training to a loss of {loss:.3f}, halfway from no exchange to an "
            "all-reduce:"
        )
        yield title, ["method", "steps", *links], wait_rows_of(results, rates, loss)


def write_markdown(bench: Bench, path: Path) -> None:
    """Write the tables, the notes and the facts as one page."""
    lines = ["# Training over slow links", ""]
    for title, columns, rows in _tables(bench.results, bench.rates):
        lines += [title, ""] if title else []
        lines += markdown(columns, [[f"`{method}`", *cells] for method, *cells in rows])
        lines.append("")
    lines += [*(f"* {note}" for note in make_notes(bench.results, bench.rates)), ""]
    facts = bench.facts.items()
    lines += markdown(
        ["", ""], [[name, f"`{text}`" if name == "Command" else text] for name, text in facts]
    )
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
