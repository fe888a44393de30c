"""The tables and the plots."""

import statistics
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from rich.table import Table

from benchmarks.studies.scale.predicted import Predicted, break_even
from benchmarks.studies.scale.training import Trained
from comm_hooks.launchers.lab.plots import BLACK, GREY, new_figure, save, style, write_numbers
from comm_hooks.launchers.lab.tables import format_bytes, make_table


def trained_tables(runs: Sequence[Trained]) -> list[Table]:
    """Return what was learnt, what was sent, and how far what arrived is from the exact mean."""
    if not runs:
        return []
    return [
        _by_ranks("Held-out error, percent, mean over seeds", runs, _error),
        _by_ranks(
            "Error of the sums over the second half of the steps, what feedback leaves, percent",
            runs,
            lambda some: _percent([run.lasting_error for run in some]),
        ),
        _by_ranks(
            "Error of the mean of one round, percent of its length",
            runs,
            lambda some: _percent([run.round_error for run in some]),
        ),
        _by_ranks(
            "Sent per rank and step, as much as received",
            runs,
            lambda some: format_bytes(some[0].bytes_sent),
        ),
    ]


def _by_ranks(
    title: str, runs: Sequence[Trained], cell: Callable[[Sequence[Trained]], str]
) -> Table:
    counts = sorted({run.ranks for run in runs})
    rows = []
    for name, lr in dict.fromkeys((run.method, run.lr) for run in runs):
        of_method = [
            [run for run in runs if (run.method, run.ranks) == (name, count)] for count in counts
        ]
        rows.append((name, f"{lr:g}", *(cell(some) if some else "" for some in of_method)))
    return make_table(title, ("method", "lr", *map(str, counts)), rows)


def _error(runs: Sequence[Trained]) -> str:
    if any(run.loss is None for run in runs):
        return "diverged"
    return f"{100 * statistics.mean(run.error for run in runs):.1f}"


def _percent(shares: Sequence[float | None]) -> str:
    known = [share for share in shares if share is not None]
    return f"{100 * statistics.mean(known):.0f}" if known else "-"


def predicted_tables(rows: Sequence[Predicted]) -> list[Table]:
    """Return a table per model and link, and the break-even points of all."""
    tables = []
    counts = sorted({row.ranks for row in rows})
    for model, gigabits in dict.fromkeys((row.model, row.gigabits) for row in rows):
        some = [row for row in rows if (row.model, row.gigabits) == (model, gigabits)]
        fastest = {
            count: min(
                (row for row in some if row.ranks == count and row.bytes_sent),
                key=lambda row: row.seconds,
            )
            for count in counts
        }
        cells = [
            (
                scheme,
                *(
                    f"{1e3 * row.seconds:,.0f}" + "*" * (fastest[row.ranks] is row)
                    for row in some
                    if row.scheme == scheme
                ),
            )
            for scheme in dict.fromkeys(row.scheme for row in some)
        ]
        title = (
            f"Predicted, not measured: {model} parameters, {gigabits:g} Gbit/s between nodes of 8, "
            "ms per step; *: the fastest that communicates"
        )
        tables.append(make_table(title, ("method", *map(str, counts)), cells))
    points = [
        (
            *(point["scheme"], point["than"], point["model"], f"{point['gigabits']:g}"),
            str(point["ranks"] or "never"),
        )
        for point in break_even(rows)
    ]
    columns = ("method", "slower than", "model", "Gbit/s", "from ranks")
    return [*tables, make_table("Predicted: from how many ranks on", columns, points)]


def write_trained_plots(runs: Sequence[Trained], out: Path) -> list[Path]:
    """Write errors and bytes against ranks; return their paths."""
    if not runs:
        return []
    return [
        _plot_by_ranks(
            runs,
            lambda run: 100 * run.error,
            "held-out error (%)",
            "{:g}".format,
            out / "error-vs-ranks.png",
        ),
        _plot_by_ranks(
            runs,
            lambda run: run.bytes_sent,
            "bytes sent per rank and step",
            format_bytes,
            out / "bytes-vs-ranks.png",
        ),
    ]


def _plot_by_ranks(
    runs: Sequence[Trained],
    y: Callable[[Trained], float],
    label: str,
    write: Callable[[float], str],
    path: Path,
) -> Path:
    figure, (axes,) = new_figure(width=6)
    for index, name in enumerate(dict.fromkeys(run.method for run in runs)):
        own = [run for run in runs if run.method == name]
        counts = sorted({run.ranks for run in own})
        means = [statistics.mean(y(run) for run in own if run.ranks == n) for n in counts]
        if any(means):  # nothing has no place on a logarithmic axis
            axes.plot(counts, means, label=name, **_look(name, index))
    axes.set_yscale("log")
    write_numbers(axes.yaxis, write)
    axes.set_ylabel(label)
    _count_ranks(axes)
    return save(figure, path)


def write_predicted_plot(rows: Sequence[Predicted], out: Path) -> Path:
    """Write step times against ranks, a panel per model and link; return the path."""
    cases = list(dict.fromkeys((row.model, row.gigabits) for row in rows))
    columns = len({gigabits for _, gigabits in cases})
    figure, panels = new_figure(columns, rows=len(cases) // columns, width=3.6)
    schemes = list(dict.fromkeys(row.scheme for row in rows))
    for axes, (model, gigabits) in zip(panels, cases, strict=True):
        some = [row for row in rows if (row.model, row.gigabits) == (model, gigabits)]
        idle = {row.ranks: row.seconds for row in some if not row.bytes_sent}
        for index, scheme in enumerate(schemes):
            own = [row for row in some if row.scheme == scheme]
            axes.plot(
                [row.ranks for row in own],
                [row.seconds / idle[row.ranks] for row in own],
                label=scheme,
                **_look(scheme, index),
            )
        axes.set_yscale("log")
        axes.set_title(f"{model}, {gigabits:g} Gbit/s (predicted)", fontsize="medium")
        _count_ranks(axes)
    for axes in panels[::columns]:
        axes.set_ylabel("step / step without exchange")
        axes.yaxis.set_major_formatter("{x:g}")
    return save(figure, out / "predicted-steps.png")


def _look(name: str, index: int) -> dict[str, Any]:
    """Return the look of a method; the controls, which come first, are black and grey."""
    if name.startswith("no"):
        return {"color": GREY, "linestyle": "dashed"}
    if name.startswith("all-reduce"):
        return {"color": BLACK}
    return {**style(index - 2), "marker": "."}


def _count_ranks(axes: Axes) -> None:
    axes.set_xscale("log", base=2)
    axes.xaxis.set_major_formatter("{x:g}")
    axes.set_xlabel("ranks")
