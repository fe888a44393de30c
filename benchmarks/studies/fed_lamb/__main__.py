"""The command, see ``--help``: its options and its table."""

from dataclasses import replace
from functools import partial
from typing import Annotated

from benchmarks.lab import tables
from benchmarks.lab.outcomes import Outcome
from benchmarks.lab.schedules import constant
from benchmarks.lab.training import Plan
from benchmarks.studies import cli
from benchmarks.studies.fed_lamb.methods import BETAS, LAMBDAS, METHODS, make_methods


def fed_lamb(
    task: cli.TaskName,
    data_dir: cli.DataDir,
    task_option: cli.TaskOptions,
    clients: Annotated[int, replace(cli.CLIENTS, full=50)],
    participation: Annotated[
        float,
        cli.Option("The fraction of the clients drawn for each round.", 0.5, check=cli.fraction),
    ],
    rounds: Annotated[int, cli.Option("Rounds per run.", 50, 15, least=1)],
    batch: Annotated[int, replace(cli.BATCH, full=32)],
    local_steps: Annotated[
        list[int],
        cli.Option(
            "A client's steps per round (T). An epoch of a client of digits is one step.",
            *("1,10", "2"),
            least=1,
        ),
    ],
    partitions: Annotated[
        list[str],
        cli.Option(
            "How data is divided: iid, classes (or contiguous).",
            "iid,classes",
            known=("iid", "classes", "contiguous"),
        ),
    ],
    methods: Annotated[
        list[str], cli.Option("What is compared.", ",".join(METHODS), known=METHODS)
    ],
    target: Annotated[
        float, cli.Option("An error, 0 to 1: the table says which round reached it.", 0.1)
    ],
    validation: cli.Validation,
    seeds: Annotated[int, cli.SEEDS],
    tries: Annotated[int, replace(cli.TRIES, full=8, quick=6)],
    points: Annotated[int, replace(cli.POINTS, full=50)],
    device: cli.Device,
) -> cli.Comparison:
    """Compare FED-LAMB with Fed-AMS and Fed-SGD: many clients, half of them in each round.

    In the partition "classes" each client has samples of two classes (classes_per_client). Learning
    rates are constant, and tuned on data apart from those that are reported, with as many tries for
    each method and weight decay of FED-LAMB together.
    """
    tasks = {
        partition: cli.build_tasks(
            task,
            data_dir,
            clients=clients,
            seeds=seeds,
            validation=validation,
            partition=partition,
            **task_option,
        )
        for partition in partitions
    }
    plan = Plan(rounds, local_steps[0], batch, min(points, rounds), constant, device=device)
    return cli.Comparison(
        make_methods(methods, tasks, plan=plan, local_steps=local_steps, fraction=participation),
        rounds,
        tables.TITLE,
        partial(columns_of, target=target),
        lambda outcome: outcome.labels,
        {"task_options": task_option, "schedule": "constant", "betas": BETAS, "lambdas": LAMBDAS},
    )


def columns_of(outcomes: list[Outcome], target: float) -> tables.Columns:
    """Return the columns of the table.

    Args:
        outcomes: the methods.
        target: an error; the table shows the first round with at most that.
    """

    def rounds_to(outcome: Outcome) -> str:
        firsts = (
            next((p.round for p in run.curve if p.error <= target), "-") for run in outcome.runs
        )
        return " ".join(map(str, firsts))

    return {
        "partition": tables.label("partition"),
        "T": tables.label("T"),
        "method": lambda outcome: outcome.name,
        "sent": tables.sent,
        "lr": tables.learning_rate,
        "lambda": tables.setting("lambda"),
        **tables.JUDGED,
        f"rounds to {100 * target:g} %": rounds_to,
    }


app = cli.study(fed_lamb)

if __name__ == "__main__":
    app()
