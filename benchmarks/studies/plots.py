"""The look of all plots: means as lines, every seed faintly behind."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator, MaxNLocator, NullFormatter

from benchmarks.studies.runs import Outcome, Point
from comm_hooks.launchers.compare.table import format_bytes

# Okabe and Ito's palette, which colour-blind readers can tell apart, without black, which is for
# what the others are measured by, and without yellow, which is hard to see on white; and two of
# Tol's that go with it.
COLOURS = (
    *("#0072B2", "#D55E00", "#009E73", "#CC79A7"),
    *("#E69F00", "#56B4E9", "#882255", "#999933"),
)
BLACK = "#18181b"
GREY = "#8a8a93"

_FAINT = 0.3


def style(index: int) -> dict[str, Any]:
    """Return the look of the method with this number."""
    lap, colour = divmod(index, len(COLOURS))
    return {"color": COLOURS[colour], "linestyle": ("solid", "dashed", "dotted")[lap % 3]}


def new_figure(columns: int, rows: int = 1, width: float = 4.2) -> tuple[Figure, list[Axes]]:
    """Return a figure and its panels, row by row."""
    figure = Figure(figsize=(width * columns + 2.2, 3.4 * rows), layout="constrained")
    panels = figure.subplots(rows, columns, squeeze=False, sharey=True)
    for axes in panels.flat:
        axes.grid(color="#e4e4e7", linewidth=0.8)
        axes.set_axisbelow(True)
        axes.spines[["top", "right"]].set_visible(False)
    return figure, list(panels.flat)


def draw_curves(
    axes: Axes,
    outcome: Outcome,
    label: str,
    look: dict[str, Any],
    x: Callable[[Point], float] = lambda point: point.round,
    y: Callable[[Point], float] = lambda point: 100 * point.error,
) -> None:
    """Draw a method's mean curve, and those of its seeds faintly; from where x is positive."""
    mean = [point for point in outcome.mean_curve() if x(point) > 0]
    if not mean:
        return
    if len(outcome.runs) > 1:
        for run in outcome.runs:
            points = [point for point in run.curve if x(point) > 0]
            axes.plot(
                [x(p) for p in points],
                [y(p) for p in points],
                **{**look, "linewidth": 0.8, "alpha": _FAINT},
            )
    axes.plot([x(p) for p in mean], [y(p) for p in mean], label=label, **{"linewidth": 1.8, **look})


def draw_ends(
    axes: Axes,
    outcomes: Sequence[Outcome],
    label: str,
    look: dict[str, Any],
    y: Callable[[Point], float] = lambda point: 100 * point.error,
) -> None:
    """Draw where methods end against what they cost: a line over the means, every seed a dot."""
    finished = [o for o in outcomes if not o.diverged and o.bytes_per_round > 0]
    if not finished:
        return
    finished = sorted(finished, key=lambda outcome: outcome.bytes_per_round)
    ends = [[y(run.curve[-1]) for run in outcome.runs] for outcome in finished]
    costs = [outcome.bytes_per_round for outcome in finished]
    axes.plot(costs, [sum(e) / len(e) for e in ends], label=label, marker="o", **look)
    for cost, values in zip(costs, ends, strict=True):
        dots = {"color": look["color"], "linestyle": "none", "alpha": _FAINT}
        axes.plot([cost] * len(values), values, marker=".", **dots)


def count_rounds(axes: Axes) -> None:
    """Let the x axis count rounds."""
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.set_xlabel("round")


def count_bytes(axes: Axes, text: str = "bytes sent per client and round") -> None:
    """Let the x axis count bytes on a logarithmic scale."""
    axes.set_xscale("log")
    axes.xaxis.set_major_formatter(lambda count, _: format_bytes(count))
    axes.xaxis.set_minor_formatter(NullFormatter())
    axes.set_xlabel(text)


def count_percent(axes: Axes) -> None:
    """Let the y axis count percent on a logarithmic scale."""
    axes.set_yscale("log")
    axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axes.yaxis.set_major_formatter(lambda percent, _: f"{percent:g}")
    axes.yaxis.set_minor_formatter(NullFormatter())


def save(figure: Figure, panels: Sequence[Axes], path: Path) -> Path:
    """Add the legend and write the figure."""
    entries = {}
    for axes in panels:
        handles, labels = axes.get_legend_handles_labels()
        entries.update(dict(zip(labels, handles, strict=True)))
    if entries:
        figure.legend(entries.values(), entries.keys(), loc="outside right upper", frameon=False)
    figure.savefig(path, dpi=140)
    return path
