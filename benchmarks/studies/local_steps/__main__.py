"""The command; see ``--help``."""

from dataclasses import replace
from typing import Annotated, Any

from benchmarks.studies import cli
from benchmarks.studies.local_steps.equal_loss import default_target, needed
from benchmarks.studies.local_steps.figures import make_tables, write_plots
from benchmarks.studies.local_steps.methods import (
    BETAS,
    EXEMPT_BITS,
    VALUE_BITS,
    WEIGHT_DECAY,
    Study,
    make_methods,
    numel,
    warm_up,
)
from comm_hooks.launchers.lab.outcomes import Outcome
from comm_hooks.launchers.lab.simulated import Plan

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
            "task_option": options,
            "parameters": numel(tasks[0]),
            "value_bits": VALUE_BITS,
            "exempt_bits": EXEMPT_BITS,
            "warm_up": _WARM_UP,
            "betas": BETAS,
            "weight_decay": WEIGHT_DECAY,
        },
        findings,
    )


app = cli.study(local_steps)

if __name__ == "__main__":
    app()
