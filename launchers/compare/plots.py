"""The three plots as files, for documents: loss against steps, against bytes, against time."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import LogFormatter, MaxNLocator

from comm_hooks.launchers.compare.looks import assign_looks
from comm_hooks.launchers.compare.runs import Run

# Okabe and Ito's palette, which colour-blind readers can tell apart, without its black and its
# yellow: black and grey are for the two that the others are measured by, and yellow on white is
# hard to see for everybody.
_OKABE_ITO = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9")
_COLOURS = {
    "baseline": "#18181b",
    "control": "#8a8a93",
    **dict(zip("012345", _OKABE_ITO, strict=True)),
}
_DASHES = ("solid", "dashed", "dotted")
LOSS = "loss on all data (nats per byte)"

Styles = dict[str, dict[str, Any]]


def write_plots(runs: list[Run], folder: Path) -> list[Path]:
    """Write ``loss-vs-{step,bytes,time}.png`` for the runs that have a curve; return the paths.

    Args:
        runs: of one comparison: each method once.
        folder: where to write.
    """
    styles = styles_of(runs)
    drawn = [run for run in runs if run.curve]
    paths = []
    for name, draw in {"step": _by_step, "bytes": draw_by_bytes, "time": _by_time}.items():
        figure = Figure(figsize=(9, 4.5), layout="constrained")
        axes = figure.subplots()
        draw(axes, drawn, styles)
        paths.append(folder / f"loss-vs-{name}.png")
        save(figure, [axes], paths[-1])
    return paths


def styles_of(runs: list[Run]) -> Styles:
    """Return how each method's line looks, by its name."""
    return {
        run.method: {
            "linewidth": 1.8,
            "color": _COLOURS[look.colour],
            "linestyle": _DASHES[look.dash],
        }
        for run, look in zip(runs, assign_looks(run.method for run in runs), strict=True)
    }


def save(figure: Figure, panels: Sequence[Axes], path: Path) -> None:
    """Write a figure, with grids, and one legend for all its panels."""
    for axes in panels:
        axes.grid(color="#e4e4e7", linewidth=0.8)
        axes.set_axisbelow(True)
        axes.spines[["top", "right"]].set_visible(False)
    handles, labels = panels[0].get_legend_handles_labels()
    if handles:
        figure.legend(handles, labels, loc="outside right upper", frameon=False)
    figure.savefig(path, dpi=160)


def _plot(axes: Axes, run: Run, x: list[float], style: dict[str, Any]) -> None:
    losses = [point.loss for point in run.curve]
    axes.plot(x, losses, label=run.method, marker="o", markersize=3.5, **style)


def _by_step(axes: Axes, runs: list[Run], styles: Styles) -> None:
    for run in runs:
        _plot(axes, run, [point.step for point in run.curve], styles[run.method])
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.set_ylabel(LOSS)
    axes.set_xlabel("step")


def _by_time(axes: Axes, runs: list[Run], styles: Styles) -> None:
    for run in runs:
        _plot(axes, run, [point.seconds for point in run.curve], styles[run.method])
    axes.set_ylabel(LOSS)
    axes.set_xlabel("seconds of training on this machine (no network in between)")


def draw_by_bytes(axes: Axes, runs: list[Run], styles: Styles) -> None:
    """Draw the loss of runs that have a curve against the bytes that it had cost."""
    for run in runs:
        style = styles[run.method]
        sent = [point.bytes_sent / 1e6 for point in run.curve]
        if sent[-1] > 0:
            _plot(axes, run, sent, style)
        else:
            # A logarithmic axis has no zero: what sends nothing is a level, not a curve.
            axes.axhline(run.curve[-1].loss, label=f"{run.method} (0 bytes, at the end)", **style)
    axes.set_xscale("log")
    axes.xaxis.set_major_formatter(LogFormatter())
    axes.set_ylabel(LOSS)
    axes.set_xlabel("MB sent per rank, warm-up included (log scale)")
