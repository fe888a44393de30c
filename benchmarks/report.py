"""A table and loss curves of several runs, in the terminal and as one HTML page.

    python -m benchmarks.report runs.jsonl my_log.jsonl --out report.html

Reads the ``runs.jsonl`` of ``compare``, and logs that ``StatsLogger`` wrote: one JSON object per
line with ``step``, ``loss``, ``bytes_sent``, ``bytes_received`` and ``seconds``, all counts since
the start of the run. A log is named by its ``method`` field, else by its file.
"""

import html
import io
import json
import math
import statistics
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Annotated, Any

import plotly.graph_objects as go
import typer
from plotly.subplots import make_subplots
from rich.console import Console
from rich.text import Text

from benchmarks.lab.clock import MOST_RANGE, MOST_STARVED, roughly
from benchmarks.lab.runs import BASELINE, CONTROL, Figures, Point, Run, RunSpec, parse_run
from benchmarks.lab.tables import format_bytes, make_table
from comm_hooks.launchers.output import make_console, refusing, say

NOISE = 0.03
"""Smaller differences in loss say nothing: another seed makes as much."""
LAST_SHARE = 0.05
"""The loss of a log is the mean over the records of this last share of its steps."""

_COLUMNS = ("method", "loss", "vs all_reduce", "drift", "ms/step", "sent/step", "sent", "note")
_FIELDS = ("step", "bytes_sent", "bytes_received", "seconds")
_AXES: dict[str, Callable[[Point], float | None]] = {
    "steps": lambda point: point.round,
    "MB sent per rank": lambda point: point.bytes_sent / 1e6,
    "seconds of training": lambda point: point.seconds,
}

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False, rich_markup_mode=None)


def read_runs(*paths: Path) -> list[Run]:
    """Read all records of the files, in order.

    Raises:
        ValueError: for a file that is missing, empty or no text, and for a line that is no record;
            the message names the file and the line.
    """
    return [run for path in paths for run in _read(path)]


def _read(path: Path) -> Iterator[Run]:
    try:
        lines = path.read_text(encoding="utf-8").rstrip().splitlines()
    except OSError as error:
        raise ValueError(f"{path}: cannot read this file ({error.strerror})") from None
    except UnicodeDecodeError:
        raise ValueError(f"{path}: not a text file of JSON lines") from None
    if not lines:
        raise ValueError(f"{path}: no records in this file")
    logs: dict[str, list[dict[str, Any]]] = {}
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            values = json.loads(line)
            if not isinstance(values, dict):
                raise ValueError("not a JSON object")
            if "step" in values:
                logs.setdefault(str(values.get("method", path.stem)), []).append(_checked(values))
            else:
                yield parse_run(values)
        except (ValueError, RecursionError) as error:
            if number == len(lines) and logs and isinstance(error, json.JSONDecodeError):
                continue  # a training that is killed while it writes leaves half a line
            raise ValueError(f"{path}, line {number}: {error}") from None
    for method, records in logs.items():
        yield _run_of_log(method, records, path)


def _checked(record: dict[str, Any]) -> dict[str, Any]:
    for name in _FIELDS:
        value: Any = record.get(name)
        if type(value) not in (int, float) or not 0 <= value < 2**63:
            raise ValueError(f"{name} must be a number from 0 to 2^63, got {value!r}")
    if type(loss := record.get("loss")) not in (int, float, type(None)):
        raise ValueError(f"loss must be a number, got {loss!r}")
    return record


def _run_of_log(method: str, records: Sequence[dict[str, Any]], path: Path) -> Run:
    """Return the run of a log; of steps that are there twice the last counts."""
    by_step = {record["step"]: record for record in records if record.get("loss") is not None}
    if not by_step:
        raise ValueError(
            f"{path}: no record of {method!r} has a loss: give it, "
            "for instance StatsLogger.log(step, loss=...)"
        )
    run = Run(RunSpec(method, {"log": path.name}, {}, 0))
    kept = [by_step[step] for step in sorted(by_step)]
    for record in kept:
        step, loss = record["step"], record["loss"]
        if not abs(loss) < 1e38:
            run.failure = f"diverged: the loss is {loss} at step {step}"
            return run
        run.curve.append(
            Point(step, loss, math.nan, record["bytes_sent"], seconds=record["seconds"])
        )
    last = kept[-1]
    first = kept[0] if len(kept) > 1 else dict.fromkeys(_FIELDS, 0)
    steps = max(1, last["step"] - first["step"])
    _, sent, received, seconds = ((last[name] - first[name]) / steps for name in _FIELDS)
    end = last["step"] - LAST_SHARE * steps
    loss = statistics.fmean(point.loss for point in run.curve if point.round >= end)
    totals = last["bytes_sent"], last["bytes_received"]
    run.figures = Figures(loss, 1e3 * seconds, sent, received, *totals)
    return run


def rows_of(runs: Sequence[Run]) -> list[list[str]]:
    """Return the cells of each run, in the order of the columns."""
    baseline = next((run.figures for run in runs if run.method == BASELINE and run.figures), None)
    rows = []
    for run in runs:
        figures = run.figures
        if figures is None:
            rows.append([run.method, "failed", *["-"] * 5, run.failure or ""])
            continue
        uneven = (figures.step_range_ms or 0.0) > MOST_RANGE * figures.step_ms
        busy = uneven or (figures.starved or 0.0) > MOST_STARVED
        cells = [
            f"{figures.loss:.3f}",
            "-" if baseline is None else f"{figures.loss - baseline.loss:+.3f}",
            "-" if figures.drift is None else f"{figures.drift:.2g}",
            roughly(figures.step_ms) if busy else f"{figures.step_ms:,.0f}",
            format_bytes(figures.sent_per_step),
            format_bytes(figures.bytes_sent),
        ]
        rows.append([run.method, *cells, run.note])
    return rows


def print_table(runs: Sequence[Run], console: Console) -> None:
    """Print the table and notes; red: failed, yellow: worse than no exchange."""
    controls = [run.figures.loss for run in runs if run.method == CONTROL and run.figures]
    bound = min(controls, default=math.inf) + NOISE
    worse = [run.method for run in runs if run.figures and run.figures.loss > bound]
    styles = ["red" if r.failure else "yellow" if r.method in worse else "" for r in runs]
    console.print(make_table("", _COLUMNS, rows_of(runs), styles, whole=True))
    notes = [
        f"Loss is in nats per byte on all data; differences under {NOISE} say nothing at one seed. "
        "Bytes are those of one rank, per step after the warm-up. Drift is the largest relative "
        "distance between replicas. Milliseconds with a ~ were taken on a busy machine."
    ]
    if worse:
        notes.append(
            f"Worse than no communication at all: {', '.join(worse)}. Under Adam error feedback "
            "turns a gradient into rare pulses, and the second moment answers with tiny steps."
        )
    if len({json.dumps(run.spec.labels) for run in runs}) > 1:
        notes.append("The runs have different settings: compare those with equal settings only.")
    for note in notes:
        console.print(Text(f"* {note}"))
    console.print()


def write_page(runs: Sequence[Run], path: Path) -> None:
    """Write one HTML page that needs no network: the table, and the loss by steps, bytes, time."""
    titles = [f"loss by {axis}" for axis in _AXES]
    figure = make_subplots(rows=1, cols=len(titles), subplot_titles=titles)
    palette = figure.layout.template.layout.colorway
    for number, run in enumerate(runs):
        for column, x in enumerate(_AXES.values(), start=1):
            trace = go.Scatter(
                x=[x(point) for point in run.curve],
                y=[point.loss for point in run.curve],
                name=html.escape(run.method),
                legendgroup=str(number),
                showlegend=column == 1,
                line={"color": palette[number % len(palette)]},
            )
            figure.add_trace(trace, row=1, col=column)
    page = Console(record=True, width=160, file=io.StringIO())
    print_table(runs, page)
    for name, text in runs[0].facts.items():
        page.print(Text(f"{name}: {text}"))
    shape = '<!doctype html><meta charset="utf-8"><pre>{code}</pre>'
    table = page.export_html(code_format=shape, inline_styles=True)
    curves = figure.to_html(full_html=False, default_height="600px")
    path.write_text(table + curves, encoding="utf-8")


@app.command()
def report(
    records: Annotated[list[Path], typer.Argument(help="runs.jsonl of compare, or StatsLogger's.")],
    out: Annotated[Path, typer.Option(help="The page to write.")] = Path("report.html"),
) -> None:
    """Make one HTML page from the records of several runs: a table, and curves of the loss.

    The page needs no other file and no network. Exit codes: 0, 2 for bad input.
    """
    with refusing("python -m benchmarks.report"):
        runs = read_runs(*records)
        if out.resolve() in (path.resolve() for path in records):
            raise ValueError(f"--out {out}: this file holds records; give another name")
        try:
            write_page(runs, out)
        except OSError as error:
            raise ValueError(f"--out {out}: cannot write there ({error.strerror})") from None
    console = make_console()
    print_table(runs, console)
    say(f"Report: {out}", console)


if __name__ == "__main__":
    app()
