"""The table and the plots of a comparison of private optimizers."""

import statistics
from collections.abc import Sequence
from pathlib import Path

from matplotlib.axes import Axes
from rich.table import Table

from benchmarks.studies.plots import BLACK, GREY, new_figure, save, style
from benchmarks.studies.private_optimizers.methods import NOT_PRIVATE, epsilon_of
from benchmarks.studies.runs import Outcome
from benchmarks.studies.tables import errors, learning_rate, loss, make_table

_TITLE = "Held-out error at the end; *: the largest or smallest rate tried"
_COLUMNS = ("sigma", "epsilon", "method", "lr", "settings", "error %", "each seed", "loss")


def make_tables(outcomes: list[Outcome]) -> list[Table]:
    """Return the table, a section per noise multiplier."""
    rows: list[Sequence[str]] = []
    previous = outcomes[0].labels["sigma"]
    for outcome in outcomes:
        if outcome.labels["sigma"] != previous:
            rows.append(())
        previous = outcome.labels["sigma"]
        rows.append(_row(outcome))
    return [make_table(_TITLE, _COLUMNS, rows)]


def _row(outcome: Outcome) -> Sequence[str]:
    sigma, epsilon = outcome.labels["sigma"], end_epsilon(outcome)
    others = {key: value for key, value in outcome.settings.items() if key != "lr"}
    return (
        "-" if sigma is None else f"{sigma:g}",
        "-" if epsilon is None else f"{epsilon:.2f}",
        outcome.name,
        learning_rate(outcome),
        ", ".join(f"{key} {value:g}" for key, value in others.items()) or "-",
        *errors(outcome),
        loss(outcome),
    )


def end_epsilon(outcome: Outcome) -> float | None:
    """Return what a run has spent at its end; None without privacy."""
    curve = outcome.runs[0].curve
    return epsilon_of(curve[-1]) if curve else None


def write_plots(outcomes: list[Outcome], out: Path) -> list[Path]:
    """Write the three plots; return their paths."""
    return [
        _ends(outcomes, out / "accuracy-vs-sigma.png", by_epsilon=False),
        _ends(outcomes, out / "accuracy-vs-epsilon.png", by_epsilon=True),
        _curves(outcomes, out / "accuracy-vs-spent.png"),
    ]


def _names(outcomes: list[Outcome]) -> list[str]:
    return list(dict.fromkeys(o.name for o in outcomes if o.name != NOT_PRIVATE))


def _draw_without_privacy(axes: Axes, outcomes: list[Outcome]) -> None:
    for outcome in outcomes:
        if outcome.name == NOT_PRIVATE:
            level = 100 * (1 - statistics.mean(outcome.errors))
            axes.axhline(level, color=BLACK, linestyle="dotted", label=NOT_PRIVATE)


def _ends(outcomes: list[Outcome], path: Path, *, by_epsilon: bool) -> Path:
    """A line per method over the means, a dot per seed."""
    figure, panels = new_figure(1, width=6)
    axes = panels[0]
    for index, name in enumerate(_names(outcomes)):
        ends = []
        for outcome in outcomes:
            x = end_epsilon(outcome) if by_epsilon else outcome.labels["sigma"]
            if outcome.name == name and x is not None and not outcome.diverged:
                ends.append((x, [100 * (1 - error) for error in outcome.errors]))
        if not ends:
            continue
        ends.sort()
        look = style(index)
        means = [statistics.mean(values) for _, values in ends]
        axes.plot([x for x, _ in ends], means, label=name, marker="o", markersize=4, **look)
        for x, values in ends:
            axes.plot([x] * len(values), values, ".", color=look["color"], alpha=0.3)
    _draw_without_privacy(axes, outcomes)
    axes.set_xscale("log")
    ticks = [
        x
        for o in outcomes
        if (x := end_epsilon(o) if by_epsilon else o.labels["sigma"]) is not None
    ]
    axes.set_xticks(sorted(set(ticks)))
    axes.xaxis.set_major_formatter(lambda value, _: f"{value:.3g}")
    axes.minorticks_off()
    axes.set_xlabel("epsilon at the end" if by_epsilon else "noise multiplier sigma")
    axes.set_ylabel("held-out accuracy (%)")
    return save(figure, panels, path)


def _curves(outcomes: list[Outcome], path: Path) -> Path:
    """A panel per noise multiplier: accuracy as the budget is spent."""
    sigmas = list(dict.fromkeys(s for o in outcomes if (s := o.labels["sigma"]) is not None))
    figure, panels = new_figure(max(1, len(sigmas)), width=3.2)
    names = _names(outcomes)
    for axes, sigma in zip(panels, sigmas, strict=False):
        for outcome in outcomes:
            if outcome.labels["sigma"] != sigma:
                continue
            look = style(names.index(outcome.name))
            curve = outcome.mean_curve()
            # What is spent does not depend on the seed.
            spent = [epsilon_of(point) or 0.0 for point in outcome.runs[0].curve[: len(curve)]]
            accuracy = [100 * (1 - point.error) for point in curve]
            axes.plot(spent, accuracy, label=outcome.name, linewidth=1.8, **look)
        _draw_without_privacy(axes, outcomes)
        axes.set_title(f"sigma = {sigma:g}", fontsize="medium", color=GREY)
        axes.set_xlabel("epsilon")
    panels[0].set_ylabel("held-out accuracy (%)")
    return save(figure, panels, path)
