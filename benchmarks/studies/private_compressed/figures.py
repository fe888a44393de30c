"""The table and the plot of a comparison of compressed private training."""

import statistics
from collections.abc import Sequence
from pathlib import Path

from matplotlib.axes import Axes
from rich.table import Table

from benchmarks.studies.plots import BLACK, COLOURS, GREY, count_bytes, new_figure, save
from benchmarks.studies.private_compressed.schemes import ALONE, CONTROL, end_of
from benchmarks.studies.runs import Outcome
from benchmarks.studies.tables import errors, fewer, learning_rate, loss, make_table
from comm_hooks.launchers.compare.table import format_bytes

_TITLE = (
    "Sent: bytes per rank and step; epsilon against who sees the model, and single ranks' messages"
)
_COLUMNS = (
    *("ranks", "optimizer", "scheme", "over", "sent", "fewer", "lr"),
    *("error %", "each seed", "loss", "epsilon", "of ranks"),
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
    rows: list[Sequence[str]] = []
    for panel in _panels(outcomes):
        full = next((o.bytes_per_round for o in panel if o.name == CONTROL), 0.0)
        rows += [_row(outcome, full) for outcome in panel]
        rows.append(())
    return [make_table(_TITLE, _COLUMNS, rows[:-1])]


def _panels(outcomes: list[Outcome]) -> list[list[Outcome]]:
    cases: dict[tuple[int, str], list[Outcome]] = {}
    for outcome in outcomes:
        case = outcome.labels["ranks"], outcome.labels["optimizer"]
        cases.setdefault(case, []).append(outcome)
    return list(cases.values())


def _row(outcome: Outcome, full: float) -> Sequence[str]:
    end = end_of(outcome.runs[0].curve)
    return (
        str(outcome.labels["ranks"]),
        outcome.labels["optimizer"],
        outcome.name,
        outcome.labels["over"],
        format_bytes(outcome.bytes_per_round),
        fewer(full, outcome.bytes_per_round),
        learning_rate(outcome),
        *errors(outcome),
        loss(outcome),
        f"{end.epsilon:.2f}" if end else "-",
        "none" if end and end.peer_epsilon is None else f"{end.peer_epsilon:.2f}" if end else "-",
    )


def write_plots(outcomes: list[Outcome], out: Path) -> list[Path]:
    """Write ``accuracy-vs-bytes.png``: a panel per number of ranks and optimizer."""
    cases = _panels([o for o in outcomes if o.labels["over"] == "simulated"])
    columns = len({case[0].labels["optimizer"] for case in cases})
    figure, panels = new_figure(columns, -(-len(cases) // columns), width=3.6)
    for axes, case in zip(panels, cases, strict=False):
        for outcome in case:
            _draw(axes, outcome)
        labels = case[0].labels
        axes.set_title(f"{labels['optimizer']}, {labels['ranks']} ranks", fontsize="medium")
        count_bytes(axes, "bytes sent per rank and step")
        axes.set_ylabel("held-out accuracy (%)")
    return [save(figure, panels, out / "accuracy-vs-bytes.png")]


def _draw(axes: Axes, outcome: Outcome) -> None:
    if outcome.diverged:
        return
    accuracies = [100 * (1 - error) for error in outcome.errors]
    mean = statistics.mean(accuracies)
    if outcome.name == ALONE:
        axes.axhline(mean, color=GREY, linestyle="dotted", label=ALONE)
        return
    placement, _, compressor = outcome.name.partition(":")
    colour = BLACK if outcome.name == CONTROL else COLOURS[_PLACEMENTS.index(placement)]
    cost = outcome.bytes_per_round
    axes.plot([cost], [mean], _MARKERS[compressor], color=colour, label=outcome.name)
    axes.plot([cost] * len(accuracies), accuracies, ".", color=colour, alpha=0.3)
