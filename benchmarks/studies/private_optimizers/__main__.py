"""The command; see ``--help``."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer

from benchmarks.studies import cli
from benchmarks.studies.private_optimizers.figures import make_tables, write_plots
from benchmarks.studies.private_optimizers.methods import (
    METHODS,
    TASKS,
    build_images,
    make_methods,
)
from benchmarks.studies.private_training import PrivatePlan, default_delta
from benchmarks.studies.progress import open_display
from benchmarks.studies.report import conduct
from benchmarks.studies.runs import Outcome
from benchmarks.studies.tuning import run_method
from comm_hooks.config import unknown
from comm_hooks.launchers.output import make_console

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False, rich_markup_mode=None)

_STEPS = {"digits": 150, "cifar10": 875}
_BATCH = {"digits": 64, "cifar10": 4096}


@app.command()
def private_optimizers(
    task: Annotated[str, typer.Option(help=f"What to learn: {', '.join(TASKS)}.")] = "digits",
    data_dir: cli.DataDir = None,
    steps: Annotated[
        int | None,
        typer.Option(help="Steps per run. [default: 150, cifar10: 875, quick: 22]"),
    ] = None,
    batch: Annotated[
        int | None,
        typer.Option(help="Expected samples per step. [default: 64, cifar10: 4096]"),
    ] = None,
    sigmas: Annotated[
        str | None,
        typer.Option(metavar="LIST", help="Noise multipliers. [default: 0.6,1,2,4, quick: 1,3]"),
    ] = None,
    max_grad_norm: Annotated[
        float, typer.Option(help="C. Methods that scale gradients first have ten times that.")
    ] = 1.0,
    delta: Annotated[
        float | None,
        typer.Option(help="Of the guarantee. [default: half of one over the private images]"),
    ] = None,
    methods: Annotated[str, typer.Option(metavar="LIST", help="What is compared.")] = ",".join(
        METHODS
    ),
    micro_batch: Annotated[
        int, typer.Option(help="Samples whose gradients are in memory at a time.")
    ] = 128,
    seeds: cli.Seeds = None,
    tries: cli.Tries = None,
    points: cli.Points = 10,
    device: cli.Device = "cpu",
    threads: cli.Threads = 1,
    out: Annotated[Path, typer.Option(help="Folder for the results.")] = Path(
        "comm-hooks-report/private_optimizers"
    ),
    quick: cli.Quick = False,
) -> None:
    """Compare private optimizers: accuracy against the noise and against epsilon.

    Learning rates are constant, and tuned on the first seed by the same number of tries for each
    method, noise multiplier and other setting (default: 3 tries and 3 seeds, quick: 1 and 1).
    Tuning is not accounted for: it would cost budget on data that need protection. Noise and
    samples are drawn anew in every run, so a repeated study gives slightly other figures. Writes
    private_optimizers.json and plots to --out. Exit codes: 0, 2 for bad input, 130 if interrupted
    (what is finished is reported).
    """
    with cli.bad_input("private_optimizers"):
        names = cli.parse_names("--methods", methods, METHODS)
        if not names:
            raise ValueError("there is nothing to compare: --methods is empty")
        if task not in TASKS:
            raise ValueError(f"--task: {unknown('name', task, TASKS)}")
        steps = (22 if quick else _STEPS[task]) if steps is None else steps
        batch = _BATCH[task] if batch is None else batch
        seeds = (1 if quick else 3) if seeds is None else seeds
        tries = (1 if quick else 3) if tries is None else tries
        cli.require_at_least(
            1,
            steps=steps,
            batch=batch,
            micro_batch=micro_batch,
            seeds=seeds,
            tries=tries,
            points=points,
        )
        levels = cli.parse_numbers("--sigmas", sigmas or ("1,3" if quick else "0.6,1,2,4"), float)
        images = [build_images(task, seed, data_dir) for seed in range(seeds)]
        samples = len(images[0].task.clients[0])
        plan = PrivatePlan(
            steps,
            batch,
            batch / samples,  # public: the size of the data set is published
            1.0,
            max_grad_norm,
            default_delta(samples) if delta is None else delta,
            min(points, steps),
            micro_batch,
            device,
        )
        plans = [replace(plan, noise_multiplier=sigma) for sigma in levels]
        for each in plans:
            each.check(samples)
        cli.prepare(device, threads, out)

    compared = make_methods(names, images, plans)
    console = make_console()

    def outcomes() -> Iterator[Outcome]:
        with open_display(console, len(compared)) as display:
            for method in compared:
                total = range(seeds)
                yield run_method(method, seeds=total, tries=tries, rounds=steps, display=display)

    settings = {
        "task": task,
        "private images": samples,
        "public images": len(images[0].public),
        "steps": steps,
        "batch": batch,
        "sigmas": levels,
        "max_grad_norm": max_grad_norm,
        "delta": plan.delta,
        "accountant": "rdp",
        "schedule": "constant",
        "seeds": seeds,
        "tries": tries,
        "device": device,
    }
    conduct(
        "private_optimizers",
        outcomes(),
        settings,
        out,
        console,
        make_tables=make_tables,
        write_plots=write_plots,
    )


if __name__ == "__main__":
    app()
