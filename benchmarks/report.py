"""A table and loss curves of several runs, in the terminal and as one HTML page.

    python -m benchmarks.report runs.jsonl my_log.jsonl --out report.html

Reads the ``runs.jsonl`` of ``compare``, and logs that ``StatsLogger`` wrote: one JSON object per
line with ``step``, ``loss``, ``bytes_sent``, ``bytes_received`` and ``seconds``, all counts since
the start of the run. A log is named by its ``method`` field, else by its file.
"""

import html
import json
import math
import statistics
from collections.abc import Iterator, Mapping, Sequence
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
from comm_hooks.launchers.output import make_console, refusing

NOISE = 0.03
"""Smaller differences in loss say nothing: another seed makes as much."""
LAST_SHARE = 0.05
"""The loss of a log is the mean over the records of this last share of its steps."""

_COLUMNS = ("method", "loss", "vs all_reduce", "drift", "ms/step", "sent/step", "sent", "note")
_FIELDS = ("step", "bytes_sent", "bytes_received", "seconds")
_MOST = 2**63
_AXES = ("steps", "MB sent per rank", "seconds of training")

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
        lines = path.read_text(encoding="utf-8").splitlines()
    except OSError as error:
        raise ValueError(f"{path}: cannot read this file ({error.strerror})") from None
    except UnicodeDecodeError:
        raise ValueError(f"{path}: not a text file of JSON lines") from None
    logs: dict[str, list[dict[str, Any]]] = {}
    found = 0
    for number, line in enumerate(lines, start=1):
        try:
            values = json.loads(line) if line.strip() else None
            if values is None:
                continue
            if not isinstance(values, dict):
                raise ValueError("not a JSON object")
            if "step" in values:
                logs.setdefault(str(values.get("method", path.stem)), []).append(_checked(values))
            else:
                yield parse_run(values)
            found += 1
        except (ValueError, RecursionError) as error:
            if number == len(lines) and logs and isinstance(error, json.JSONDecodeError):
                continue  # a training that is killed while it writes leaves half a line
            raise ValueError(f"{path}, line {number}: {error}") from None
    if not found:
        raise ValueError(f"{path}: no records in this file")
    for method, records in logs.items():
        yield _run_of_log(method, records, path)


def _checked(record: dict[str, Any]) -> dict[str, Any]:
    for name in _FIELDS:
        value: Any = record.get(name)
        if type(value) not in (int, float) or not 0 <= value < _MOST:
            raise ValueError(f"{name} must be a number from 0 to 2^63, got {value!r}")
    if type(loss := record.get("loss")) not in (int, float, type(None)):
        raise ValueError(f"loss must be a number, got {loss!r}")
    return record


def _run_of_log(method: str, records: Sequence[Mapping[str, Any]], path: Path) -> Run:
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
        if not abs(record["loss"]) < 1e38:
            run.failure = f"diverged: the loss is {record['loss']} at step {record['step']}"
            return run
        loss, sent, seconds = (record[name] for name in ("loss", "bytes_sent", "seconds"))
        run.curve.append(Point(record["step"], loss, math.nan, sent, seconds=seconds))
    first, last = kept[0], kept[-1]
    if first is last:  # since the run started
        first = dict.fromkeys(_FIELDS, 0)
    steps = max(1, last["step"] - first["step"])
    per_step = {name: (last[name] - first[name]) / steps for name in _FIELDS}
    end = last["step"] - LAST_SHARE * steps
    run.figures = Figures(
        loss=statistics.fmean(record["loss"] for record in kept if record["step"] >= end),
        drift=None,
        step_ms=1e3 * per_step["seconds"],
        sent_per_step=per_step["bytes_sent"],
        received_per_step=per_step["bytes_received"],
        bytes_sent=last["bytes_sent"],
        bytes_received=last["bytes_received"],
    )
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
        rows.append(
            [
                run.method,
                f"{figures.loss:.3f}",
                "-" if baseline is None else f"{figures.loss - baseline.loss:+.3f}",
                "-" if figures.drift is None else f"{figures.drift:.2g}",
                roughly(figures.step_ms) if busy else f"{figures.step_ms:,.0f}",
                format_bytes(figures.sent_per_step),
                format_bytes(figures.bytes_sent),
                run.note,
            ]
        )
    return rows


def _is_worse(run: Run, runs: Sequence[Run]) -> bool:
    """Return whether a run did worse than no exchange, beyond noise."""
    controls = [each.figures.loss for each in runs if each.method == CONTROL and each.figures]
    return bool(run.figures and controls and run.figures.loss > min(controls) + NOISE)


def _notes(runs: Sequence[Run]) -> list[str]:
    notes = [
        f"Loss is in nats per byte on all data; differences under {NOISE} say nothing at one seed. "
        "Bytes are those of one rank, per step after the warm-up. Drift is the largest relative "
        "distance between replicas. Milliseconds with a ~ were taken on a busy machine."
    ]
    if worse := [run.method for run in runs if _is_worse(run, runs)]:
        notes.append(
            f"Worse than no communication at all: {', '.join(worse)}. Under Adam error feedback "
            "turns a gradient into rare pulses, and the second moment answers with tiny steps."
        )
    if len({json.dumps(run.spec.labels) for run in runs}) > 1:
        notes.append("The runs have different settings: compare those with equal settings only.")
    return notes


def print_table(runs: Sequence[Run], console: Console) -> None:
    """Print the table and the notes; red: failed, yellow: worse than no exchange."""
    styles = ["red" if run.failure else "yellow" if _is_worse(run, runs) else "" for run in runs]
    console.print(make_table("", _COLUMNS, rows_of(runs), styles, whole=True))
    for note in _notes(runs):
        console.print(Text(f"* {note}"))
    console.print()


def write_page(runs: Sequence[Run], path: Path) -> None:
    """Write one HTML page that needs no network: the table, and the loss by steps, bytes, time."""
    figure = make_subplots(
        rows=2,
        cols=3,
        specs=[[{"type": "table", "colspan": 3}, None, None], [{"type": "xy"}] * 3],
        subplot_titles=("", *(f"loss by {axis}" for axis in _AXES)),
    )
    columns = list(zip(*rows_of(runs), strict=True))
    cells = [[html.escape(cell) for cell in column] for column in columns]
    figure.add_trace(go.Table(header={"values": _COLUMNS}, cells={"values": cells}), row=1, col=1)
    palette = figure.layout.template.layout.colorway or ["black"]
    for number, run in enumerate(runs):
        losses = [point.loss for point in run.curve]
        steps = [point.round for point in run.curve]
        sent = [point.bytes_sent / 1e6 for point in run.curve]
        seconds = [point.seconds for point in run.curve]
        for column, xs in enumerate((steps, sent, seconds), start=1):
            trace = go.Scatter(
                x=xs,
                y=losses,
                name=html.escape(run.method),
                legendgroup=str(number),
                showlegend=column == 1,
                line={"color": palette[number % len(palette)]},
            )
            figure.add_trace(trace, row=2, col=column)
    for column, axis in enumerate(_AXES, start=1):
        figure.update_xaxes(title=axis, row=2, col=column)
    facts = [f"{name}: {text}" for name, text in (runs[0].facts.items() if runs else ())]
    figure.update_layout(
        title="<br>".join(html.escape(line) for line in ("Runs", *_notes(runs), *facts)),
        title_font_size=12,
        margin_t=240,
        height=1000,
    )
    figure.write_html(path, include_plotlyjs=True)


@app.command()
def report(
    records: Annotated[
        list[Path],
        typer.Argument(
            metavar="RUNS.JSONL...",
            help="The runs.jsonl of comparisons, and logs that StatsLogger wrote.",
        ),
    ],
    out: Annotated[Path, typer.Option(help="The page to write.")] = Path("report.html"),
) -> None:
    """Make one HTML page from the records of several runs: a table, and curves of the loss.

    The page needs no other file and no network. Exit codes: 0, 2 for bad input (nothing is
    written).
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
    console.print(Text(f"Report: {out}"), soft_wrap=True)


if __name__ == "__main__":
    app()
