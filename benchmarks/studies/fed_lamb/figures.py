"""The table and the plot of a comparison of FED-LAMB with Fed-AMS and Fed-SGD."""

from pathlib import Path

from rich.table import Table

from comm_hooks.launchers.lab import plots, tables
from comm_hooks.launchers.lab.outcomes import Outcome


def make_tables(outcomes: list[Outcome], target: float) -> list[Table]:
    """Return the table, a section for each partition and number of local steps.

    Args:
        target: an error, whose first round is shown.
    """

    def rounds_to(outcome: Outcome) -> str:
        """Return the first round that was judged to be at most so wrong, for each seed."""
        firsts = (
            next((p.round for p in run.curve if p.error <= target), "-") for run in outcome.runs
        )
        return " ".join(map(str, firsts))

    columns: tables.Columns = {
        "partition": tables.label("partition"),
        "T": tables.label("T"),
        "method": lambda outcome: outcome.name,
        "sent": tables.sent,
        "lr": tables.learning_rate,
        "lambda": tables.setting("lambda"),
        **tables.JUDGED,
        f"rounds to {100 * target:g} %": rounds_to,
    }
    return [tables.tabulate(tables.TITLE, columns, outcomes, lambda outcome: outcome.labels)]


def write_plots(outcomes: list[Outcome], out: Path) -> list[Path]:
    """Write ``error-vs-rounds.png``, a panel for each partition and number of local steps."""
    cases = list(dict.fromkeys((o.labels["partition"], o.labels["T"]) for o in outcomes))
    names = list(dict.fromkeys(o.name for o in outcomes))
    figure, panels = plots.new_figure(len(cases))
    for axes, case in zip(panels, cases, strict=True):
        for outcome in outcomes:
            if (outcome.labels["partition"], outcome.labels["T"]) == case:
                look = plots.style(names.index(outcome.name))
                plots.draw_curves(axes, outcome, outcome.name, look)
        axes.set_title(f"{case[0]}, T = {case[1]}", fontsize="medium")
        plots.count_rounds(axes)
        plots.count_percent(axes)
    panels[0].set_ylabel("held-out error (%)")
    return [plots.save(figure, out / "error-vs-rounds.png")]
