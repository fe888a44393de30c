"""The table and the plots of a comparison of private optimizers."""

import statistics
from collections.abc import Callable, Sequence
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from rich.table import Table

from benchmarks.studies.private_optimizers.methods import NOT_PRIVATE
from benchmarks.studies.private_training import end_of
from comm_hooks.launchers.lab import plots, tables
from comm_hooks.launchers.lab.outcomes import Outcome

_ACCURACY = "held-out accuracy (%)"


def make_tables(outcomes: list[Outcome]) -> list[Table]:
    """Return the table, a section per noise multiplier."""
    columns: tables.Columns = {
        "sigma": tables.label("sigma"),
        "epsilon": lambda o: "-" if (end := end_epsilon(o)) is None else f"{end:.2f}",
        "method": lambda outcome: outcome.name,
        "lr": tables.learning_rate,
        "settings": tables.other_settings,
        **tables.JUDGED,
    }
    title = "Held-out error at the end; *: the largest or smallest rate tried"
    return [tables.tabulate(title, columns, outcomes, lambda outcome: outcome.labels["sigma"])]


def end_epsilon(outcome: Outcome) -> float | None:
    """Return what a run has spent at its end; None without privacy."""
    end = end_of(outcome.runs[0].curve)
    return end.epsilon if end else None


def write_plots(outcomes: list[Outcome], out: Path) -> list[Path]:
    """Write the three plots; return their paths."""
    by_sigma = _ends(outcomes, lambda outcome: outcome.labels["sigma"], "noise multiplier sigma")
    by_epsilon = _ends(outcomes, end_epsilon, "epsilon at the end")
    figures = {"sigma": by_sigma, "epsilon": by_epsilon, "spent": _curves(outcomes)}
    return [plots.save(figure, out / f"accuracy-vs-{x}.png") for x, figure in figures.items()]


def _names(outcomes: list[Outcome]) -> list[str]:
    return list(dict.fromkeys(o.name for o in outcomes if o.name != NOT_PRIVATE))


def _accuracies(outcome: Outcome) -> Sequence[float]:
    return [100 * (1 - error) for error in outcome.errors]


def _draw_without_privacy(axes: Axes, outcomes: list[Outcome]) -> None:
    for outcome in outcomes:
        if outcome.name == NOT_PRIVATE:
            look = {"color": plots.BLACK, "linestyle": "dotted"}
            plots.draw_level(axes, statistics.mean(_accuracies(outcome)), NOT_PRIVATE, look)


def _ends(outcomes: list[Outcome], x: Callable[[Outcome], float | None], label: str) -> Figure:
    """A line per method over the means, a dot per seed."""
    figure, (axes,) = plots.new_figure(width=6)
    for index, name in enumerate(_names(outcomes)):
        own = [o for o in outcomes if o.name == name and not o.diverged]
        ends = [(at, _accuracies(o)) for o in own if (at := x(o)) is not None]
        plots.draw_ends(axes, ends, name, {"markersize": 4, **plots.style(index)})
    _draw_without_privacy(axes, outcomes)
    axes.set_xscale("log")
    axes.set_xticks(sorted({at for o in outcomes if (at := x(o)) is not None}))
    plots.write_numbers(axes.xaxis, "{:.3g}".format)
    axes.minorticks_off()
    axes.set_xlabel(label)
    axes.set_ylabel(_ACCURACY)
    return figure


def _curves(outcomes: list[Outcome]) -> Figure:
    """A panel per noise multiplier: accuracy as the budget is spent."""
    sigmas = list(dict.fromkeys(s for o in outcomes if (s := o.labels["sigma"]) is not None))
    figure, panels = plots.new_figure(max(1, len(sigmas)), width=3.2)
    names = _names(outcomes)
    for axes, sigma in zip(panels, sigmas, strict=False):
        for outcome in outcomes:
            if outcome.labels["sigma"] != sigma:
                continue
            curve = outcome.mean_curve()
            # What is spent does not depend on the seed.
            ends = [end_of([point]) for point in outcome.runs[0].curve[: len(curve)]]
            spent = [end.epsilon if end else 0.0 for end in ends]
            accuracy = [100 * (1 - point.error) for point in curve]
            look = plots.style(names.index(outcome.name))
            axes.plot(spent, accuracy, label=outcome.name, linewidth=1.8, **look)
        _draw_without_privacy(axes, outcomes)
        axes.set_title(f"sigma = {sigma:g}", fontsize="medium", color=plots.GREY)
        axes.set_xlabel("epsilon")
    panels[0].set_ylabel(_ACCURACY)
    return figure
