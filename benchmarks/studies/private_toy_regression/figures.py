"""The table and the plot of the toy regression."""

import statistics
from collections.abc import Sequence
from pathlib import Path

from rich.table import Table

from benchmarks.studies.plots import count_rounds, draw_curves, new_figure, save, style
from benchmarks.studies.runs import Outcome
from benchmarks.studies.tables import learning_rate, make_table

_HIGHEST = 3.5  # half as much again as predicting the mean label gives


def reached(outcome: Outcome) -> str:
    """Return the mean loss, in words."""
    return f"loss {statistics.mean(outcome.losses):.4f}"


def make_tables(outcomes: list[Outcome], epsilon: float, delta: float) -> list[Table]:
    """Return the table, a section with privacy and one without."""
    columns = ("method", "private", "lr", "other settings", "final loss", "each seed")
    rows: list[Sequence[str]] = []
    previous = outcomes[0].labels
    for outcome in outcomes:
        if outcome.labels != previous:
            rows.append(())
        previous = outcome.labels
        rows.append(_row(outcome))
    title = (
        f"Final training loss; private: epsilon {epsilon:.2f} at delta {delta:g} by RDP; *: the "
        "largest or smallest rate tried"
    )
    return [make_table(title, columns, rows)]


def _row(outcome: Outcome) -> Sequence[str]:
    others = {key: value for key, value in outcome.settings.items() if key != "lr"}
    mean, each = "diverged", "-"
    if not outcome.diverged:
        mean = f"{statistics.mean(outcome.losses):.4f}"
        each = " ".join(f"{loss:.4f}" for loss in outcome.losses)
    return (
        outcome.name,
        outcome.labels["private"],
        learning_rate(outcome),
        ", ".join(f"{key} {value:g}" for key, value in others.items()) or "-",
        mean,
        each,
    )


def write_plots(outcomes: list[Outcome], out: Path) -> list[Path]:
    """Write ``loss-vs-steps-private.png`` and ``loss-vs-steps-not-private.png``."""
    paths = []
    for private, file in (("yes", "private"), ("no", "not-private")):
        shown = [o for o in outcomes if o.labels["private"] == private and not o.diverged]
        if not shown:
            continue
        figure, panels = new_figure(1, width=7)
        for place, outcome in enumerate(shown):
            look = style(place)
            draw_curves(panels[0], outcome, outcome.name, look, y=lambda point: point.loss)
        if private == "yes":
            # The first steps, down from 14, would press the rest together.
            panels[0].set_ylim(0, _HIGHEST)
        else:
            panels[0].set_yscale("log")
        count_rounds(panels[0])
        panels[0].set_xlabel("step")
        panels[0].set_ylabel("training loss")
        paths.append(save(figure, panels, out / f"loss-vs-steps-{file}.png"))
    return paths
