"""The table and the plots of a comparison of local steps."""

import statistics
from collections.abc import Callable
from pathlib import Path

from rich.table import Table

from benchmarks.studies.local_steps.equal_loss import needed
from benchmarks.studies.local_steps.methods import ALL_REDUCE, ALONE
from comm_hooks.launchers.lab import plots, tables
from comm_hooks.launchers.lab.outcomes import Outcome

_LOSS = "held-out loss (nats)"


def make_tables(outcomes: list[Outcome], target: float | None) -> list[Table]:
    """Return the table, a section per number of local steps."""
    baseline = next((o for o in outcomes if o.name == ALL_REDUCE and not o.diverged), None)

    def gap(outcome: Outcome) -> str:
        """Return the mean distance to the baseline."""
        if outcome.diverged or baseline is None:
            return "-"
        return f"{statistics.mean(outcome.losses) - statistics.mean(baseline.losses):+.3f}"

    def to_target(place: int, write: Callable[[float], str]) -> Callable[[Outcome], str]:
        def cell(outcome: Outcome) -> str:
            cost = None if target is None else needed(outcome.mean_curve(), target)
            return write(cost[place]) if cost else "-"

        return cell

    columns: tables.Columns = {
        "method": lambda outcome: outcome.name,
        "H": tables.label("H"),
        "density": lambda outcome: _density(outcome) or "-",
        "server lr": tables.setting("server lr"),
        "sent/step": tables.sent,
        "fewer": tables.fewer(baseline.bytes_per_round if baseline else 0.0),
        "loss": lambda o: "diverged" if o.diverged else tables.mean_loss(o),
        "each seed": lambda o: "-" if o.diverged else " ".join(f"{x:.3f}" for x in o.losses),
        "vs all-reduce": gap,
        "steps to it": to_target(0, "{:.0f}".format),
        "bytes to it": to_target(1, tables.format_bytes),
    }
    goal = f"; it: a loss of {target:.3f}" if target is not None else ""
    title = f"Sent: bytes per client and step; held-out loss{goal}"
    return [tables.tabulate(title, columns, outcomes, lambda outcome: outcome.labels["H"])]


def _density(outcome: Outcome) -> str | None:
    density = outcome.labels["density"]
    return None if density is None else f"1/{1 / density:.4g}"


def write_plots(outcomes: list[Outcome], out: Path) -> list[Path]:
    """Write the two plots; return their paths."""
    return [
        _by_bytes_so_far(outcomes, out / "loss-vs-bytes.png"),
        _by_bytes_per_step(outcomes, out / "loss-vs-bytes-per-step.png"),
    ]


def _name(outcome: Outcome) -> str:
    if outcome.name in (ALL_REDUCE, ALONE):
        return outcome.name
    return f"H = {outcome.labels['H']}, {_density(outcome) or 'exact'}"


def _looks(outcomes: list[Outcome]) -> dict[str, plots.Style]:
    """Give each H a colour and each density a dash."""
    local = [o for o in outcomes if o.name not in (ALL_REDUCE, ALONE)]
    steps = list(dict.fromkeys(o.labels["H"] for o in local))
    densities = list(dict.fromkeys(o.labels["density"] for o in local))
    looks: dict[str, plots.Style] = {
        ALL_REDUCE: {"color": plots.BLACK},
        ALONE: {"color": plots.GREY, "linestyle": "dashed"},
    }
    for outcome in local:
        looks[_name(outcome)] = {
            **plots.style(steps.index(outcome.labels["H"]) % len(plots.COLOURS)),
            "linestyle": plots.DASHES[densities.index(outcome.labels["density"]) % 4],
        }
    return looks


def _by_bytes_so_far(outcomes: list[Outcome], path: Path) -> Path:
    looks = _looks(outcomes)
    figure, (axes,) = plots.new_figure(width=7)
    for outcome in outcomes:
        name = _name(outcome)
        if not outcome.diverged and outcome.bytes_per_round > 0:
            plots.draw_curves(
                axes, outcome, name, looks[name], lambda p: p.bytes_sent, lambda p: p.loss
            )
        elif not outcome.diverged:
            level = statistics.mean(outcome.losses)
            plots.draw_level(axes, level, f"{outcome.name}, at the end", looks[name])
    plots.count_bytes(axes, "bytes sent per client so far")
    axes.set_ylabel(_LOSS)
    return plots.save(figure, path)


def _by_bytes_per_step(outcomes: list[Outcome], path: Path) -> Path:
    figure, (axes,) = plots.new_figure(width=7)
    finished = [outcome for outcome in outcomes if not outcome.diverged]
    steps = dict.fromkeys(o.labels["H"] for o in outcomes if o.labels["H"] is not None)
    for index, count in enumerate(steps):
        group = [o for o in finished if o.labels["H"] == count and o.name != ALL_REDUCE]
        ends = [(o.bytes_per_round, o.losses) for o in group if o.bytes_per_round > 0]
        plots.draw_ends(axes, ends, f"H = {count}", plots.style(index % len(plots.COLOURS)))
    for outcome in finished:
        if outcome.name in (ALL_REDUCE, ALONE):
            look = _looks(outcomes)[outcome.name]
            plots.draw_level(axes, statistics.mean(outcome.losses), outcome.name, look)
    plots.count_bytes(axes, "bytes sent per client and step")
    axes.set_ylabel(f"{_LOSS} at the end")
    return plots.save(figure, path)
