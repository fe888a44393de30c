"""The command; see ``--help``."""

from collections.abc import Iterator
from pathlib import Path
from typing import Annotated

import typer

from benchmarks.studies import cli
from benchmarks.studies.private_compressed.figures import make_tables, write_plots
from benchmarks.studies.private_compressed.processes import repeat_over_gloo
from benchmarks.studies.private_compressed.schemes import (
    ALONE,
    OPTIMIZERS,
    SCHEMES,
    Study,
    make_methods,
)
from benchmarks.studies.private_training import PrivatePlan, default_delta
from benchmarks.studies.progress import open_display
from benchmarks.studies.report import conduct
from benchmarks.studies.runs import Outcome
from benchmarks.studies.tuning import run_method
from comm_hooks.launchers.output import make_console

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False, rich_markup_mode=None)


@app.command()
def private_compressed(
    ranks: Annotated[
        str | None,
        typer.Option(metavar="LIST", help="Numbers of ranks. [default: 2,4, quick: 2]"),
    ] = None,
    optimizers: Annotated[
        str | None,
        typer.Option(
            metavar="LIST", help=f"[default: {','.join(OPTIMIZERS)}, quick: {OPTIMIZERS[1]}]"
        ),
    ] = None,
    schemes: Annotated[
        str, typer.Option(metavar="LIST", help="Where noise is added, and what compresses.")
    ] = ",".join(SCHEMES),
    gloo: Annotated[
        str,
        typer.Option(
            metavar="LIST",
            help="Schemes that are run once more, as processes over gloo: with the first optimizer "
            "and number of ranks, the rate and the first seed of the simulated run.",
        ),
    ] = "local:topk",
    ratio: Annotated[
        float, typer.Option(help="Size of messages over that of gradients, where it is a choice.")
    ] = 0.1,
    steps: Annotated[
        int | None, typer.Option(help="Steps per run. [default: 150, quick: 22]")
    ] = None,
    batch: Annotated[int, typer.Option(help="Expected samples per step, over all ranks.")] = 64,
    sigma: Annotated[float, typer.Option(help="The noise multiplier.")] = 1.0,
    max_grad_norm: Annotated[float, typer.Option(help="C.")] = 1.0,
    delta: Annotated[
        float | None,
        typer.Option(help="Of the guarantee. [default: half of one over the samples]"),
    ] = None,
    seeds: cli.Seeds = None,
    tries: cli.Tries = None,
    points: cli.Points = 5,
    device: cli.Device = "cpu",
    threads: cli.Threads = 1,
    out: Annotated[Path, typer.Option(help="Folder for the results.")] = Path(
        "comm-hooks-report/private_compressed"
    ),
    quick: cli.Quick = False,
) -> None:
    """Compare compressed private training with exact exchange and with none, at equal epsilon.

    Digits, a perceptron. Learning rates are constant, and tuned on the first seed by the same
    number of tries for each method (default: 3 tries and 3 seeds, quick: 1 and 1), which is not
    accounted for. Noise and samples are drawn anew in every run, so a repeated study gives slightly
    other figures. Writes private_compressed.json and a plot to --out. Exit codes: 0, 2 for bad
    input, 130 if interrupted (what is finished is reported).
    """
    with cli.bad_input("private_compressed"):
        counts = cli.parse_numbers("--ranks", ranks or ("2" if quick else "2,4"), int)
        chosen = cli.parse_names("--schemes", schemes, tuple(SCHEMES))
        default = OPTIMIZERS[1] if quick else ",".join(OPTIMIZERS)
        names = cli.parse_names(
            "--optimizers", default if optimizers is None else optimizers, OPTIMIZERS
        )
        if not chosen or not names:
            raise ValueError("there is nothing to compare: --schemes or --optimizers is empty")
        repeated = cli.parse_names("--gloo", gloo, [name for name in SCHEMES if name != ALONE])
        steps = (22 if quick else 150) if steps is None else steps
        seeds = (1 if quick else 3) if seeds is None else seeds
        tries = (1 if quick else 3) if tries is None else tries
        cli.require_at_least(
            1, ranks=min(counts), steps=steps, batch=batch, seeds=seeds, tries=tries, points=points
        )
        if not 0 < ratio <= 1:
            raise ValueError(f"--ratio must lie in (0, 1], got {ratio:g}")
        tasks = cli.build_tasks("digits", None, clients=1, seeds=seeds)
        samples = len(tasks[0].clients[0])
        if max(counts) > samples:
            raise ValueError(f"--ranks: {samples} samples are not enough for {max(counts)} ranks")
        plan = PrivatePlan(
            steps,
            batch,
            batch / samples,  # public: the size of the data set is published
            sigma,
            max_grad_norm,
            default_delta(samples) if delta is None else delta,
            min(points, steps),
            device=device,
        )
        plan.check(samples)
        cli.prepare(device, threads, out)

    study = Study(tasks, plan, ratio)
    compared = make_methods(study, chosen, names, counts)
    console = make_console()

    def outcomes() -> Iterator[Outcome]:
        with open_display(console, len(compared)) as display:
            for method in compared:
                total = range(seeds)
                outcome = run_method(
                    method, seeds=total, tries=tries, rounds=steps, display=display
                )
                yield outcome
                first = {"ranks": counts[0], "optimizer": names[0], "over": "simulated"}
                if outcome.name in repeated and outcome.labels == first:
                    yield repeat_over_gloo(study, outcome)

    settings = {
        "task": "digits",
        "samples": samples,
        "ranks": counts,
        "ratio": ratio,
        "steps": steps,
        "batch": batch,
        "sigma": sigma,
        "max_grad_norm": max_grad_norm,
        "delta": plan.delta,
        "accountant": "rdp",
        "schedule": "constant",
        "seeds": seeds,
        "tries": tries,
        "device": device,
    }
    conduct(
        "private_compressed",
        outcomes(),
        settings,
        out,
        console,
        make_tables=make_tables,
        write_plots=write_plots,
    )


if __name__ == "__main__":
    app()
