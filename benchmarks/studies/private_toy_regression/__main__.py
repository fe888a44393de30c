"""The command; see ``--help``."""

import statistics
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.table import Table

from benchmarks.studies import cli
from benchmarks.studies.private_toy_regression.figures import make_tables, reached, write_plots
from benchmarks.studies.private_toy_regression.methods import GRID, Fit, Study, make_methods
from benchmarks.studies.private_toy_regression.problem import BATCH, LABEL_VARIANCE, SAMPLES
from benchmarks.studies.progress import open_display
from benchmarks.studies.report import conduct
from benchmarks.studies.runs import Outcome
from benchmarks.studies.tuning import run_method
from comm_hooks.launchers.output import make_console
from comm_hooks.optim.private.accounting import GaussianEvent, RDPAccountant

_DELTA = 1 / SAMPLES

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False, rich_markup_mode=None)


@app.command()
def private_toy_regression(
    steps: Annotated[
        int | None, typer.Option(help="Steps per run. [default: 2250, quick: 600]")
    ] = None,
    noise_multiplier: Annotated[float, typer.Option(help="sigma.")] = 0.7,
    max_grad_norm: Annotated[float, typer.Option(help="C.")] = 0.5,
    rates: Annotated[
        str | None,
        typer.Option(
            metavar="LIST",
            help="Learning rates: each method tries all of them, on the first seed. [default: "
            f"{','.join(f'{rate:g}' for rate in GRID)}, quick: 0.005,0.02,0.2]",
        ),
    ] = None,
    seeds: cli.Seeds = None,
    points: cli.Points = 45,
    threads: cli.Threads = 1,
    out: Annotated[Path, typer.Option(help="Folder for the results.")] = Path(
        "comm-hooks-report/private_toy_regression"
    ),
    quick: cli.Quick = False,
) -> None:
    """Repeat the toy regression of AdaDPS, with and without privacy.

    1,000 samples, 50 frequent features that mean little and 450 rare ones that mean everything.
    With privacy: AdaDPS, DP-SGD, DP-Adam, DP-AdamBC, DP-RMSProp, AdaDPS's preconditioner after the
    noise, scale-then-privatize and DP^2. Without: AdaS, SGD and Adam. Every method is tuned on the
    first of 5 seeds (quick: 1). Writes private_toy_regression.json and two plots to --out. Exit
    codes: 0, 2 for bad input, 130 if interrupted (what is finished is reported).
    """
    with cli.bad_input("private_toy_regression"):
        steps = (600 if quick else 2250) if steps is None else steps
        seeds = (1 if quick else 5) if seeds is None else seeds
        cli.require_at_least(1, steps=steps, seeds=seeds, points=points)
        cli.require_at_least(1e-3, noise_multiplier=noise_multiplier, max_grad_norm=max_grad_norm)
        default = ",".join(map(str, (0.005, 0.02, 0.2) if quick else GRID))
        tried = cli.parse_numbers("--rates", rates or default, float)
        for rate in tried:
            cli.require_at_least(0, rates=rate)
        cli.prepare("cpu", threads, out)

    study = Study(steps, noise_multiplier, max_grad_norm, tried, min(points, steps))
    methods = make_methods(study)
    history = [GaussianEvent(noise_multiplier, BATCH / SAMPLES, steps)]
    epsilon = RDPAccountant().epsilon(history, _DELTA)
    console = make_console()

    def outcomes() -> Iterator[Outcome]:
        with open_display(console, len(methods), reached) as display:
            for method in methods:
                outcome = run_method(
                    method, seeds=range(seeds), tries=1, rounds=steps, display=display
                )
                yield Fit(**vars(outcome))

    def tables(finished: list[Outcome]) -> list[Table]:
        return make_tables(finished, epsilon, _DELTA)

    def findings(finished: list[Outcome]) -> dict[str, Any]:
        return {
            "final_loss": {
                o.name: None if o.diverged else statistics.mean(o.losses) for o in finished
            },
            "epsilon": epsilon,
            "delta": _DELTA,
        }

    settings = {
        "steps": steps,
        "samples": SAMPLES,
        "batch": BATCH,
        "label_variance": LABEL_VARIANCE,
        "noise_multiplier": noise_multiplier,
        "max_grad_norm": max_grad_norm,
        "rates": tried,
        "seeds": seeds,
    }
    conduct(
        "private_toy_regression",
        outcomes(),
        settings,
        out,
        console,
        make_tables=tables,
        write_plots=write_plots,
        findings=findings,
    )


if __name__ == "__main__":
    app()
