"""The table and the plot of the toy regression."""

import statistics
from pathlib import Path

from rich.table import Table

from comm_hooks.launchers.lab import plots, tables
from comm_hooks.launchers.lab.outcomes import Outcome

_HIGHEST = 3.5  # half as much again as predicting the mean label gives


def reached(outcome: Outcome) -> str:
    """Return the mean loss, in words."""
    return f"loss {statistics.mean(outcome.losses):.4f}"


def make_tables(outcomes: list[Outcome], epsilon: float, delta: float) -> list[Table]:
    """Return the table, a section with privacy and one without."""
    columns: tables.Columns = {
        "method": lambda outcome: outcome.name,
        "private": tables.label("private"),
        "lr": tables.learning_rate,
        "other settings": tables.other_settings,
        "final loss": lambda o: "diverged" if o.diverged else f"{statistics.mean(o.losses):.4f}",
        "each seed": lambda o: "-" if o.diverged else " ".join(f"{x:.4f}" for x in o.losses),
    }
    title = (
        f"Final training loss; private: epsilon {epsilon:.2f} at delta {delta:g} by RDP; *: the "
        "largest or smallest rate tried"
    )
    return [tables.tabulate(title, columns, outcomes, lambda outcome: outcome.labels)]


def write_plots(outcomes: list[Outcome], out: Path) -> list[Path]:
    """Write ``loss-vs-steps-private.png`` and ``loss-vs-steps-not-private.png``."""
    paths = []
    for private, file in (("yes", "private"), ("no", "not-private")):
        shown = [o for o in outcomes if o.labels["private"] == private and not o.diverged]
        if not shown:
            continue
        figure, (axes,) = plots.new_figure(width=7)
        for place, outcome in enumerate(shown):
            look = plots.style(place)
            plots.draw_curves(axes, outcome, outcome.name, look, y=lambda point: point.loss)
        if private == "yes":
            # The first steps, down from 14, would press the rest together.
            axes.set_ylim(0, _HIGHEST)
        else:
            axes.set_yscale("log")
        plots.count_rounds(axes, "step")
        axes.set_ylabel("training loss")
        paths.append(plots.save(figure, out / f"loss-vs-steps-{file}.png"))
    return paths
