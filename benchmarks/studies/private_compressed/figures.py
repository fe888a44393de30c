"""The table and the plot of a comparison of compressed private training."""

import statistics
from pathlib import Path

from matplotlib.axes import Axes
from rich.table import Table

from benchmarks.studies.private_compressed.schemes import ALONE, CONTROL
from benchmarks.studies.private_training import end_of
from comm_hooks.launchers.lab import plots, tables
from comm_hooks.launchers.lab.outcomes import Outcome

_TITLE = (
    "Sent: bytes per rank and step; epsilon against who sees the model, and single ranks' messages"
)
_PLACEMENTS = ("central", "shares", "local", "aggregate")
_MARKERS = {
    "dense": "o",
    "topk": "^",
    "sign": "s",
    "random_k": "D",
    "srht": "v",
    "count_sketch": "P",
}


def make_tables(outcomes: list[Outcome]) -> list[Table]:
    """Return the table, a section per number of ranks and optimizer."""
    full = {_case(o): o.bytes_per_round for o in outcomes if o.name == CONTROL}
    columns: tables.Columns = {
        "ranks": tables.label("ranks"),
        "optimizer": tables.label("optimizer"),
        "scheme": lambda outcome: outcome.name,
        "over": tables.label("over"),
        "sent": tables.sent,
        "fewer": lambda outcome: tables.fewer(full.get(_case(outcome), 0.0))(outcome),
        "lr": tables.learning_rate,
        **tables.JUDGED,
        "epsilon": lambda o: f"{end.epsilon:.2f}" if (end := end_of(o.runs[0].curve)) else "-",
        "of ranks": _peer_epsilon,
    }
    return [tables.tabulate(_TITLE, columns, outcomes, _case)]


def _case(outcome: Outcome) -> tuple[int, str]:
    return outcome.labels["ranks"], outcome.labels["optimizer"]


def _peer_epsilon(outcome: Outcome) -> str:
    end = end_of(outcome.runs[0].curve)
    if end is None:
        return "-"
    return "none" if end.peer_epsilon is None else f"{end.peer_epsilon:.2f}"


def write_plots(outcomes: list[Outcome], out: Path) -> list[Path]:
    """Write ``accuracy-vs-bytes.png``: a panel per number of ranks and optimizer."""
    simulated = [o for o in outcomes if o.labels["over"] == "simulated"]
    cases = list(dict.fromkeys(map(_case, simulated)))
    columns = len({optimizer for _, optimizer in cases})
    figure, panels = plots.new_figure(columns, -(-len(cases) // columns), width=3.6)
    for axes, (ranks, optimizer) in zip(panels, cases, strict=False):
        for outcome in simulated:
            if _case(outcome) == (ranks, optimizer) and not outcome.diverged:
                _draw(axes, outcome)
        axes.set_title(f"{optimizer}, {ranks} ranks", fontsize="medium")
        plots.count_bytes(axes, "bytes sent per rank and step")
        axes.set_ylabel("held-out accuracy (%)")
    return [plots.save(figure, out / "accuracy-vs-bytes.png")]


def _draw(axes: Axes, outcome: Outcome) -> None:
    accuracies = [100 * (1 - error) for error in outcome.errors]
    if outcome.name == ALONE:
        look = {"color": plots.GREY, "linestyle": "dotted"}
        plots.draw_level(axes, statistics.mean(accuracies), ALONE, look)
        return
    placement, _, compressor = outcome.name.partition(":")
    colour = plots.COLOURS[_PLACEMENTS.index(placement)]
    plots.draw_ends(
        axes,
        [(outcome.bytes_per_round, accuracies)],
        outcome.name,
        {
            "color": plots.BLACK if outcome.name == CONTROL else colour,
            "linestyle": "none",
            "marker": _MARKERS[compressor],
        },
    )
