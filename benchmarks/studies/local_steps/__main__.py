"""The command, see ``--help``: its options, its tables and its plots."""

import statistics
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

from rich.table import Table

from benchmarks.studies import cli
from benchmarks.studies.local_steps.equal_loss import default_target, needed
from benchmarks.studies.local_steps.methods import (
    ALL_REDUCE,
    ALONE,
    BETAS,
    EXEMPT_BITS,
    VALUE_BITS,
    WEIGHT_DECAY,
    Study,
    make_methods,
    warm_up,
)
from comm_hooks.launchers.lab import plots, tables
from comm_hooks.launchers.lab.outcomes import Outcome
from comm_hooks.launchers.lab.simulated import Plan, numel

_QUICK_TASK = {"layers": 1, "width": 64, "heads": 2, "context": 64, "eval_windows": 64}
_WARM_UP = 20


def local_steps(
    task: Annotated[str, replace(cli.TASK, full="gpt_text")],
    data_dir: cli.DataDir,
    task_option: cli.TaskOptions,
    clients: Annotated[int, replace(cli.CLIENTS, full=2)],
    steps: Annotated[int, cli.Option("Inner steps per run.", 240, 120, least=1)],
    batch: Annotated[int, replace(cli.BATCH, full=6)],
    local_steps: Annotated[
        list[int],
        cli.Option("Steps between two exchanges (H).", "1,8,30,100", "1,8,30", least=1, each=int),
    ],
    densities: Annotated[
        list[float],
        cli.Option(
            "Fractions of the deltas that are sent.",
            *("1/16,1/64", "1/16"),
            each=float,
            check=cli.fraction,
        ),
    ],
    lr: Annotated[float, cli.Option("Learning rate of AdamW.", 1e-3, least=0)],
    server_lrs: Annotated[
        list[float],
        cli.Option(
            "Learning rates of the server, tried for compressed deltas on the first seed.",
            "1,2",
            each=float,
        ),
    ],
    fragments: Annotated[
        int, cli.Option("Parts of the model that are exchanged at different steps.", 1, least=1)
    ],
    target_loss: Annotated[
        float | None,
        cli.Option(
            "The loss at which bytes are compared. [default: that of all-reduce after three "
            "quarters of the steps]",
            None,
        ),
    ],
    seeds: Annotated[int, cli.SEEDS],
    points: Annotated[int, replace(cli.POINTS, full=24)],
    device: cli.Device,
    quick: cli.Quick,
) -> cli.Comparison:
    """Compare what a loss costs in bytes with H local steps between two exchanges.

    Every client has a contiguous part of the text and takes steps of AdamW; every H of them the
    clients average how far they have come, exactly or as top-k with one bit a value and error
    feedback. Controls: all-reduce in every step, and no communication. Runs 3 seeds (quick: 1).
    Writes local_steps.json and plots to --out. Exit codes: 0, 2 for bad input, 130 if interrupted
    (what is finished is reported).
    """
    options = {**(_QUICK_TASK if quick and task == "gpt_text" else {}), **task_option}
    tasks = cli.build_tasks(task, data_dir, clients=clients, seeds=seeds, **options)
    schedule = warm_up(min(_WARM_UP, max(1, steps // 2)), steps)
    plan = Plan(steps, 1, batch, min(points, steps), schedule, device=device)
    study = Study(tasks, plan, lr, server_lrs, fragments)

    def target(finished: list[Outcome]) -> float | None:
        return default_target(finished) if target_loss is None else target_loss

    def findings(finished: list[Outcome]) -> dict[str, Any]:
        goal = target(finished)
        if goal is None:
            return {"target_loss": None}
        costs = {o.title: needed(o.mean_curve(), goal) for o in finished}
        return {"target_loss": goal, "steps_and_bytes_to_target": costs}

    return cli.Comparison(
        make_methods(study, local_steps=local_steps, densities=densities),
        steps,
        lambda finished: make_tables(finished, target(finished)),
        write_plots,
        {
            "task_options": options,
            "parameters": numel(tasks[0]),
            "value_bits": VALUE_BITS,
            "exempt_bits": EXEMPT_BITS,
            "warm_up": _WARM_UP,
            "betas": BETAS,
            "weight_decay": WEIGHT_DECAY,
        },
        findings,
    )


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


app = cli.study(local_steps)

if __name__ == "__main__":
    app()
