"""The command; see ``--help``."""

from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Annotated

import typer

from benchmarks.studies import cli
from benchmarks.studies.fed_lamb.figures import make_tables, write_plots
from benchmarks.studies.fed_lamb.methods import BETAS, LAMBDAS, METHODS, Division, make_methods
from benchmarks.studies.progress import open_display
from benchmarks.studies.report import conduct
from benchmarks.studies.runs import Outcome
from benchmarks.studies.training import Plan, constant
from benchmarks.studies.tuning import run_method
from comm_hooks.launchers.output import make_console

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False, rich_markup_mode=None)


@app.command()
def fed_lamb(
    task: cli.TaskName = "digits",
    data_dir: cli.DataDir = None,
    task_option: cli.TaskOptions = None,
    clients: cli.Clients = 50,
    participation: Annotated[
        float, typer.Option(help="The fraction of the clients drawn for each round.")
    ] = 0.5,
    rounds: Annotated[
        int | None, typer.Option(help="Rounds per run. [default: 50, quick: 15]")
    ] = None,
    batch: cli.Batch = 32,
    local_steps: Annotated[
        str | None,
        typer.Option(
            metavar="LIST",
            help="A client's steps per round (T). An epoch of a client of digits is one step. "
            "[default: 1,10, quick: 2]",
        ),
    ] = None,
    partitions: Annotated[
        str,
        typer.Option(metavar="LIST", help="How data is divided: iid, classes (or contiguous)."),
    ] = "iid,classes",
    methods: Annotated[str, typer.Option(metavar="LIST", help="What is compared.")] = ",".join(
        METHODS
    ),
    target: Annotated[
        float, typer.Option(help="An error, 0 to 1: the table says which round reached it.")
    ] = 0.1,
    seeds: cli.Seeds = None,
    tries: cli.Tries = None,
    points: cli.Points = 50,
    device: cli.Device = "cpu",
    threads: cli.Threads = 1,
    out: Annotated[Path, typer.Option(help="Folder for the results.")] = Path(
        "comm-hooks-report/fed_lamb"
    ),
    quick: cli.Quick = False,
) -> None:
    """Compare FED-LAMB with Fed-AMS and Fed-SGD: many clients, half of them in each round.

    In the partition "classes" each client has samples of two classes (classes_per_client). Learning
    rates are constant, and tuned on the first seed by the same number of tries for each method and,
    for FED-LAMB, each weight decay; then all seeds are run (default: 4 tries and 3 seeds, quick: 2
    and 1). Writes fed_lamb.json and a plot to --out. Exit codes: 0, 2 for bad input, 130 if
    interrupted (what is finished is reported).
    """
    with cli.bad_input("fed_lamb"):
        rounds = (15 if quick else 50) if rounds is None else rounds
        seeds = (1 if quick else 3) if seeds is None else seeds
        tries = (2 if quick else 4) if tries is None else tries
        cli.require_at_least(
            1, clients=clients, rounds=rounds, batch=batch, seeds=seeds, tries=tries, points=points
        )
        if not 0 < participation <= 1:
            raise ValueError(f"--participation must lie in (0, 1], got {participation:g}")
        steps = cli.parse_numbers("--local-steps", local_steps or ("2" if quick else "1,10"), int)
        for count in steps:
            cli.require_at_least(1, local_steps=count)
        names = cli.parse_names("--methods", methods, METHODS)
        options = cli.parse_task_options(task_option)
        divisions = [
            Division(
                partition,
                cli.build_tasks(
                    task, data_dir, clients=clients, seeds=seeds, partition=partition, **options
                ),
            )
            for partition in cli.parse_names(
                "--partitions", partitions, ("iid", "classes", "contiguous")
            )
        ]
        if not names or not divisions:
            raise ValueError("there is nothing to compare: --methods or --partitions is empty")
        cli.prepare(device, threads, out)

    plan = Plan(rounds, steps[0], batch, min(points, rounds), constant, device=device)
    compared = make_methods(names, divisions, plan=plan, local_steps=steps, fraction=participation)
    console = make_console()

    def outcomes() -> Iterator[Outcome]:
        with open_display(console, len(compared)) as display:
            for method in compared:
                total = range(seeds)
                yield run_method(method, seeds=total, tries=tries, rounds=rounds, display=display)

    settings = {
        "task": task,
        "task_options": options,
        "clients": clients,
        "participation": participation,
        "rounds": rounds,
        "local_steps": steps,
        "batch": batch,
        "partitions": [division.partition for division in divisions],
        "schedule": "constant",
        "betas": BETAS,
        "lambdas": LAMBDAS,
        "seeds": seeds,
        "tries": tries,
        "device": device,
    }
    conduct(
        "fed_lamb",
        outcomes(),
        settings,
        out,
        console,
        make_tables=partial(make_tables, target=target),
        write_plots=write_plots,
    )


if __name__ == "__main__":
    app()
