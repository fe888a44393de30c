"""The table and the plot of a comparison of FED-LAMB with Fed-AMS and Fed-SGD."""

from collections.abc import Sequence
from pathlib import Path

from rich.table import Table

from benchmarks.studies.plots import (
    count_percent,
    count_rounds,
    draw_curves,
    new_figure,
    save,
    style,
)
from benchmarks.studies.runs import Outcome, Run
from benchmarks.studies.tables import TITLE, errors, learning_rate, loss, make_table
from comm_hooks.launchers.compare.table import format_bytes


def make_tables(outcomes: list[Outcome], target: float) -> list[Table]:
    """Return the table, a section for each partition and number of local steps.

    Args:
        target: an error, whose first round is shown.
    """
    columns = (
        *("partition", "T", "method", "sent", "lr", "lambda"),
        *("error %", "each seed", "loss", f"rounds to {100 * target:g} %"),
    )
    rows: list[Sequence[str]] = []
    previous = outcomes[0].labels
    for outcome in outcomes:
        if outcome.labels != previous:
            rows.append(())
        previous = outcome.labels
        rows.append(_row(outcome, target))
    return [make_table(TITLE, columns, rows)]


def _row(outcome: Outcome, target: float) -> Sequence[str]:
    return (
        str(outcome.labels["partition"]),
        str(outcome.labels["T"]),
        outcome.name,
        format_bytes(outcome.bytes_per_round),
        learning_rate(outcome),
        f"{outcome.settings['lambda']:g}" if "lambda" in outcome.settings else "-",
        *errors(outcome),
        loss(outcome),
        " ".join(_rounds_to(run, target) for run in outcome.runs),
    )


def _rounds_to(run: Run, target: float) -> str:
    """Return the first round that was judged to be at most so wrong."""
    return str(next((p.round for p in run.curve if p.error <= target), "-"))


def write_plots(outcomes: list[Outcome], out: Path) -> list[Path]:
    """Write ``error-vs-rounds.png``, a panel for each partition and number of local steps."""
    cases = list(dict.fromkeys((o.labels["partition"], o.labels["T"]) for o in outcomes))
    names = list(dict.fromkeys(o.name for o in outcomes))
    figure, panels = new_figure(len(cases))
    for axes, case in zip(panels, cases, strict=True):
        for outcome in outcomes:
            if (outcome.labels["partition"], outcome.labels["T"]) == case:
                draw_curves(axes, outcome, outcome.name, style(names.index(outcome.name)))
        axes.set_title(f"{case[0]}, T = {case[1]}", fontsize="medium")
        count_rounds(axes)
        count_percent(axes)
    panels[0].set_ylabel("held-out error (%)")
    return [save(figure, panels, out / "error-vs-rounds.png")]
