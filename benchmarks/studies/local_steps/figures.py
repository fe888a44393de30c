"""The table and the plots of a comparison of local steps."""

import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.table import Table

from benchmarks.studies.local_steps.equal_loss import needed
from benchmarks.studies.local_steps.methods import ALL_REDUCE, ALONE
from benchmarks.studies.plots import (
    BLACK,
    COLOURS,
    GREY,
    count_bytes,
    draw_curves,
    draw_ends,
    new_figure,
    save,
)
from benchmarks.studies.runs import Outcome
from benchmarks.studies.tables import fewer, make_table
from comm_hooks.launchers.compare.table import format_bytes

_DASHES = ("solid", "dashed", "dotted", "dashdot")
_LOSS = "held-out loss (nats)"


def make_tables(outcomes: list[Outcome], target: float | None) -> list[Table]:
    """Return the table, a section per number of local steps."""
    columns = (
        *("method", "H", "density", "server lr", "sent/step", "fewer", "loss", "each seed"),
        *("vs all-reduce", "steps to it", "bytes to it"),
    )
    baseline = next((o for o in outcomes if o.name == ALL_REDUCE and not o.diverged), None)
    rows: list[Sequence[str]] = []
    previous = outcomes[0].labels["H"]
    for outcome in outcomes:
        if outcome.labels["H"] != previous:
            rows.append(())
        previous = outcome.labels["H"]
        rows.append(_row(outcome, baseline, target))
    goal = f"; it: a loss of {target:.3f}" if target is not None else ""
    return [make_table(f"Sent: bytes per client and step; held-out loss{goal}", columns, rows)]


def _row(outcome: Outcome, baseline: Outcome | None, target: float | None) -> Sequence[str]:
    sent = outcome.bytes_per_round
    density = outcome.labels["density"]
    cost = None if target is None else needed(outcome.mean_curve(), target)
    return (
        outcome.name,
        "-" if outcome.labels["H"] is None else str(outcome.labels["H"]),
        "-" if density is None else f"1/{1 / density:.4g}",
        f"{outcome.settings['server lr']:g}" if "server lr" in outcome.settings else "-",
        format_bytes(sent),
        fewer(baseline.bytes_per_round if baseline else 0.0, sent),
        *_losses(outcome, baseline),
        f"{cost[0]:.0f}" if cost else "-",
        format_bytes(cost[1]) if cost else "-",
    )


def _losses(outcome: Outcome, baseline: Outcome | None) -> tuple[str, str, str]:
    """Return the mean loss, each seed's, and the mean distance to the baseline's."""
    if outcome.diverged:
        return "diverged", "-", "-"
    mean = statistics.mean(outcome.losses)
    return (
        f"{mean:.3f}",
        " ".join(f"{loss:.3f}" for loss in outcome.losses),
        f"{mean - statistics.mean(baseline.losses):+.3f}" if baseline else "-",
    )


def write_plots(outcomes: list[Outcome], out: Path) -> list[Path]:
    """Write the two plots; return their paths."""
    return [
        _by_bytes_so_far(outcomes, out / "loss-vs-bytes.png"),
        _by_bytes_per_step(outcomes, out / "loss-vs-bytes-per-step.png"),
    ]


def _name(outcome: Outcome) -> str:
    if outcome.name in (ALL_REDUCE, ALONE):
        return outcome.name
    density = outcome.labels["density"]
    kind = "exact" if density is None else f"1/{1 / density:.4g}"
    return f"H = {outcome.labels['H']}, {kind}"


def _looks(outcomes: list[Outcome]) -> dict[str, dict[str, Any]]:
    """Give each H a colour and each density a dash."""
    local = [o for o in outcomes if o.name not in (ALL_REDUCE, ALONE)]
    steps = list(dict.fromkeys(o.labels["H"] for o in local))
    densities = list(dict.fromkeys(o.labels["density"] for o in local))
    looks: dict[str, dict[str, Any]] = {
        ALL_REDUCE: {"color": BLACK},
        ALONE: {"color": GREY, "linestyle": "dashed"},
    }
    for outcome in local:
        looks[_name(outcome)] = {
            "color": COLOURS[steps.index(outcome.labels["H"]) % len(COLOURS)],
            "linestyle": _DASHES[densities.index(outcome.labels["density"]) % len(_DASHES)],
        }
    return looks


def _by_bytes_so_far(outcomes: list[Outcome], path: Path) -> Path:
    looks = _looks(outcomes)
    figure, panels = new_figure(1, width=7)
    for outcome in outcomes:
        if outcome.diverged:
            continue
        if outcome.bytes_per_round > 0:
            draw_curves(
                panels[0],
                outcome,
                _name(outcome),
                looks[_name(outcome)],
                x=lambda point: point.bytes_sent,
                y=lambda point: point.loss,
            )
        else:
            # A logarithmic axis has no zero: what sends nothing is a level, not a curve.
            mean = statistics.mean(outcome.losses)
            panels[0].axhline(mean, label=f"{outcome.name}, at the end", **looks[_name(outcome)])
    count_bytes(panels[0], "bytes sent per client so far")
    panels[0].set_ylabel(_LOSS)
    return save(figure, panels, path)


def _by_bytes_per_step(outcomes: list[Outcome], path: Path) -> Path:
    figure, panels = new_figure(1, width=7)
    steps = list(dict.fromkeys(o.labels["H"] for o in outcomes if o.labels["H"] is not None))
    for index, count in enumerate(steps):
        group = [o for o in outcomes if o.labels["H"] == count and o.name != ALL_REDUCE]
        colour = {"color": COLOURS[index % len(COLOURS)]}
        draw_ends(panels[0], group, f"H = {count}", colour, y=lambda point: point.loss)
    for outcome in outcomes:
        if outcome.name in (ALL_REDUCE, ALONE) and not outcome.diverged:
            look = _looks(outcomes)[outcome.name]
            panels[0].axhline(statistics.mean(outcome.losses), label=outcome.name, **look)
    count_bytes(panels[0], "bytes sent per client and step")
    panels[0].set_ylabel(f"{_LOSS} at the end")
    return save(figure, panels, path)
