"""The plot of a comparison: curves of its methods against rounds."""

from collections.abc import Callable, Sequence
from pathlib import Path

from matplotlib.figure import Figure

from benchmarks.lab.outcomes import Outcome
from benchmarks.lab.runs import Point


def draw_sections(
    outcomes: Sequence[Outcome],
    section: Callable[[Outcome], object],
    label: str,
    y: Callable[[Point], float],
    path: Path,
) -> None:
    """Write the mean curves of outcomes against rounds, a panel for each section.

    Args:
        outcomes: the methods.
        section: a value that all methods of a panel share.
        label: of the y axis.
        y: of a point.
        path: of the plot.
    """
    sections = list(dict.fromkeys(str(section(outcome)) for outcome in outcomes))
    names = list(dict.fromkeys(outcome.name for outcome in outcomes))
    figure = Figure(figsize=(3.2 * len(sections) + 2.2, 3.4), layout="constrained")
    panels = figure.subplots(1, len(sections), squeeze=False, sharey=True)[0]
    for axes, title in zip(panels, sections, strict=True):
        axes.set(title=title, xlabel="round")
        for outcome in outcomes:
            curve = outcome.mean_curve()
            if str(section(outcome)) == title and curve:
                rounds, values = zip(*((point.round, y(point)) for point in curve), strict=True)
                axes.plot(rounds, values, f"C{names.index(outcome.name)}", label=outcome.name)
    panels[0].set_ylabel(label)
    entries = {
        line.get_label(): line for axes in panels for line in axes.get_legend_handles_labels()[0]
    }
    figure.legend(entries.values(), entries.keys(), loc="outside right upper")
    figure.savefig(path)
