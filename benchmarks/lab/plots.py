"""The look of all plots, and what they have in common."""

import statistics
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from matplotlib.axes import Axes
from matplotlib.axis import Axis
from matplotlib.figure import Figure
from matplotlib.ticker import LogFormatter, MaxNLocator, NullFormatter

from benchmarks.lab.outcomes import Outcome
from benchmarks.lab.runs import BASELINE, CONTROL, Point, Run

# Okabe and Ito's palette, which colour-blind readers can tell apart, without black, which is for
# what the others are measured by, and without yellow, which is hard to see on white; and two of
# Tol's that go with it.
COLOURS = (
    *("#0072B2", "#D55E00", "#009E73", "#CC79A7"),
    *("#E69F00", "#56B4E9", "#882255", "#999933"),
)
BLACK = "#18181b"
GREY = "#8a8a93"
DASHES = ("solid", "dashed", "dotted", "dashdot")
LOSS = "loss on all data (nats per byte)"

_FAINT = 0.3
_METHOD_COLOURS = 6  # more are hard to tell apart where they cross

Style = dict[str, Any]


class Look(NamedTuple):
    """A colour and a way to dash a line.

    ``colour`` is ``"baseline"`` or ``"control"`` for the two that the others are measured by, else
    the place of one of the first six of :data:`COLOURS`; ``dash`` is 0 (solid), 1 (dashed) or 2
    (dotted).
    """

    colour: str | int
    dash: int

    @property
    def style(self) -> Style:
        """As matplotlib has it."""
        fixed = {"baseline": BLACK, "control": GREY}
        colour = COLOURS[self.colour] if isinstance(self.colour, int) else fixed[self.colour]
        return {"linewidth": 1.8, "color": colour, "linestyle": DASHES[self.dash]}


def assign_looks(methods: Iterable[str]) -> list[Look]:
    """Give each method a look, in order; methods named twice get two.

    Example::

        >>> [look.colour for look in assign_looks(["all_reduce", "topk", "none", "sign"])]
        ['baseline', 0, 'control', 1]
    """
    looks: list[Look] = []
    for method in methods:
        colour: str | int
        if method in (BASELINE, CONTROL):
            colour = "baseline" if method == BASELINE else "control"
            lap = sum(look.colour == colour for look in looks) + (method == CONTROL)
        else:
            others = sum(isinstance(look.colour, int) for look in looks)
            lap, colour = divmod(others, _METHOD_COLOURS)
        looks.append(Look(colour, lap % 3))
    return looks


def style(index: int) -> Style:
    """Return the look of the method with this number, where all colours are for methods."""
    lap, colour = divmod(index, len(COLOURS))
    return {"color": COLOURS[colour], "linestyle": DASHES[lap % 3]}


def new_figure(columns: int = 1, rows: int = 1, width: float = 4.2) -> tuple[Figure, list[Axes]]:
    """Return a figure and its panels, row by row."""
    figure = Figure(figsize=(width * columns + 2.2, 3.4 * rows), layout="constrained")
    panels = figure.subplots(rows, columns, squeeze=False, sharey=True)
    for axes in panels.flat:
        axes.grid(color="#e4e4e7", linewidth=0.8)
        axes.set_axisbelow(True)
        axes.spines[["top", "right"]].set_visible(False)
    return figure, list(panels.flat)


def save(figure: Figure, path: Path) -> Path:
    """Add one legend for all panels and write the figure."""
    entries = {}
    for axes in figure.axes:
        handles, labels = axes.get_legend_handles_labels()
        entries.update(dict(zip(labels, handles, strict=True)))
    if entries:
        figure.legend(entries.values(), entries.keys(), loc="outside right upper", frameon=False)
    figure.savefig(path, dpi=160)
    return path


def draw_run(axes: Axes, run: Run, x: Sequence[float], look: Style) -> None:
    """Draw the losses of a run against what it had taken to get there."""
    losses = [point.loss for point in run.curve]
    if losses:
        axes.plot(x, losses, label=run.method, marker="o", markersize=3.5, **look)
    axes.set_ylabel(LOSS)


def draw_by_bytes(axes: Axes, runs: Sequence[Run], looks: Sequence[Style]) -> None:
    """Draw the losses of runs against the bytes that they had cost."""
    for run, look in zip(runs, looks, strict=True):
        if not run.curve:
            continue
        sent = [point.bytes_sent / 1e6 for point in run.curve]
        if sent[-1] > 0:
            draw_run(axes, run, sent, look)
        else:
            draw_level(axes, run.curve[-1].loss, f"{run.method} (0 bytes, at the end)", look)
    axes.set_xscale("log")
    axes.xaxis.set_major_formatter(LogFormatter())
    axes.set_xlabel("MB sent per rank, warm-up included (log scale)")


def draw_level(axes: Axes, level: float, label: str, look: Style) -> None:
    """Draw what has no place on a logarithmic axis, which has no zero, as a line across it."""
    axes.axhline(level, label=label, **look)


def draw_curves(
    axes: Axes,
    outcome: Outcome,
    label: str,
    look: Style,
    x: Callable[[Point], float] = lambda point: point.round,
    y: Callable[[Point], float] = lambda point: 100 * point.error,
) -> None:
    """Draw a method's mean curve, and those of its seeds faintly; from where x is positive."""

    def draw(curve: Sequence[Point], **own: Any) -> None:
        points = [point for point in curve if x(point) > 0]
        axes.plot([x(p) for p in points], [y(p) for p in points], **own)

    mean = outcome.mean_curve()
    if not any(x(point) > 0 for point in mean):
        return
    if len(outcome.runs) > 1:
        for run in outcome.runs:
            draw(run.curve, **{**look, "linewidth": 0.8, "alpha": _FAINT})
    draw(mean, label=label, **{"linewidth": 1.8, **look})


def draw_sections(
    outcomes: Sequence[Outcome],
    section: Callable[[Outcome], object],
    label: str,
    y: Callable[[Point], float],
    path: Path,
) -> Path:
    """Write the mean curves of outcomes against rounds, a panel for each section; return the path.

    Args:
        outcomes: the methods.
        section: a value that all methods of a panel share.
        label: of the y axis.
        y: of a point.
        path: of the plot.
    """
    sections = list(dict.fromkeys(str(section(outcome)) for outcome in outcomes))
    names = list(dict.fromkeys(outcome.name for outcome in outcomes))
    figure, panels = new_figure(len(sections), width=3.2)
    for axes, title in zip(panels, sections, strict=True):
        for outcome in outcomes:
            if str(section(outcome)) == title:
                draw_curves(axes, outcome, outcome.name, style(names.index(outcome.name)), y=y)
        axes.set_title(title, fontsize="medium")
        count_rounds(axes)
    panels[0].set_ylabel(label)
    return save(figure, path)


def draw_ends(
    axes: Axes, ends: Iterable[tuple[float, Sequence[float]]], label: str, look: Style
) -> None:
    """Draw where methods end: a line over the means, every seed a dot.

    Args:
        axes: where.
        ends: what each has cost, and what each of its seeds has reached.
        label: of the line.
        look: its colour and dash.
    """
    ordered = sorted(ends, key=lambda end: end[0])
    if not ordered:
        return
    means = [statistics.mean(values) for _, values in ordered]
    axes.plot([cost for cost, _ in ordered], means, label=label, **{"marker": "o", **look})
    for cost, values in ordered:
        axes.plot([cost] * len(values), values, ".", color=look["color"], alpha=_FAINT)


def count_rounds(axes: Axes, what: str = "round") -> None:
    """Let the x axis count rounds."""
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.set_xlabel(what)


def write_numbers(axis: Axis, write: Callable[[float], str] = "{:g}".format) -> None:
    """Write plain numbers, at the major ticks alone."""
    axis.set_major_formatter(lambda value, _: write(value))
    axis.set_minor_formatter(NullFormatter())
