"""The command; see ``--help``."""

import json
import time
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.progress import Progress
from rich.text import Text

from benchmarks.studies import cli
from benchmarks.studies.scale.figures import (
    predicted_tables,
    trained_tables,
    write_predicted_plot,
    write_trained_plots,
)
from benchmarks.studies.scale.methods import Method, make_methods
from benchmarks.studies.scale.predicted import MODELS, Assumptions, break_even, predict_all
from benchmarks.studies.scale.training import Setup, Trained, train
from comm_hooks.config import unknown
from comm_hooks.launchers.output import make_console

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False, rich_markup_mode=None)

PARTS = ("simulated", "predicted")
_INTERRUPTED = 130  # 128 + SIGINT, as shells have it
_RATES = (0.05, 0.2, 0.8)


@app.command()
def scale(
    ranks: Annotated[
        str | None,
        typer.Option(
            metavar="LIST",
            help="Simulated ranks. [default: 2,4,16,64,256,1024, quick: 2,4,8]",
        ),
    ] = None,
    steps: Annotated[
        int | None, typer.Option(help="Training steps. [default: 30, quick: 10]")
    ] = None,
    batch: Annotated[
        int | None,
        typer.Option(
            help="Samples per step of all ranks together. [default: the most ranks, at least 64]"
        ),
    ] = None,
    density: Annotated[float, typer.Option(help="Elements that top-k keeps.")] = 1 / 16,
    ratio: Annotated[float, typer.Option(help="Of a Count-Sketch's size to the model's.")] = 1 / 16,
    tuned_at: Annotated[
        int | None,
        typer.Option(
            help="Ranks with which each method's learning rate is chosen. [default: 16, quick: 4]"
        ),
    ] = None,
    seeds: Annotated[int, typer.Option(help="Runs per method and number of ranks.")] = 1,
    predicted_ranks: Annotated[
        str, typer.Option(metavar="LIST", help="Ranks to predict step times for.")
    ] = "8,16,32,64,128,256,512,1024,2048,4096",
    gigabits: Annotated[
        str, typer.Option(metavar="LIST", help="Gbit/s of a node's link, for predictions.")
    ] = "1,10,100",
    only: Annotated[str, typer.Option(help=f"One part: {' or '.join(PARTS)}.")] = "",
    threads: cli.Threads = 1,
    out: Annotated[Path, typer.Option(help="Folder for the results.")] = Path(
        "comm-hooks-report/scale"
    ),
    quick: cli.Quick = False,
) -> None:
    """Compare ways to exchange at more and more ranks.

    Simulated ranks learn digits, each from samples of its own and with a residual of its own, with
    the same number of samples per step whatever the number of ranks. Predictions are computed from
    exact bytes and stated assumptions. Writes scale.json and plots to --out. Exit codes: 0, 2 for
    bad input, 130 if interrupted (what is finished is reported).
    """
    with cli.bad_input("scale"):
        if only and only not in PARTS:
            raise ValueError(f"--only: {unknown('part', only, PARTS)}")
        steps = (10 if quick else 30) if steps is None else steps
        tuned_at = (4 if quick else 16) if tuned_at is None else tuned_at
        cli.require_at_least(2, steps=steps)
        cli.require_at_least(1, seeds=seeds, tuned_at=tuned_at)
        default = "2,4,8" if quick else "2,4,16,64,256,1024"
        counts = cli.parse_numbers("--ranks", ranks or default, int)
        for count in counts:
            cli.require_at_least(1, ranks=count)
        batch = max(64, *counts, tuned_at) if batch is None else batch
        cli.require_at_least(1, batch=batch)
        for count in (*counts, tuned_at):
            if batch % count:
                raise ValueError(
                    f"--batch {batch} cannot be divided over {count} ranks: give a multiple"
                )
        many = sorted(set(cli.parse_numbers("--predicted-ranks", predicted_ranks, int)))
        for count in many:
            if count < 8 or count % 8:
                raise ValueError(
                    f"--predicted-ranks: nodes have 8 ranks, so give multiples of 8, got {count}"
                )
        links = cli.parse_numbers("--gigabits", gigabits, float)
        for link in links:
            if not link > 0:
                raise ValueError(f"--gigabits: must be positive, got {link:g}")
        methods = make_methods(density, ratio)
        cli.prepare("cpu", threads, out)

    console = make_console()
    record: dict[str, Any] = {"study": "scale", **cli.describe_machine()}
    written: list[Path] = []
    interrupted = False
    if only != "predicted":
        setup = Setup(steps, batch)
        started = time.monotonic()
        finished: list[Trained] = []
        try:
            _train_all(setup, methods, counts, tuned_at, seeds, console, finished)
        except KeyboardInterrupt:
            interrupted = True
        for table in trained_tables(finished):
            console.print(table)
        written += write_trained_plots(finished, out)
        record["simulated"] = {
            "settings": {
                **asdict(setup),
                "density": density,
                "ratio": ratio,
                "tuned_at": tuned_at,
                "seeds": seeds,
            },
            "complete": not interrupted,
            "seconds": round(time.monotonic() - started),
            "runs": [asdict(run) for run in finished],
        }
    if only != "simulated":
        assumptions = Assumptions()
        rows = predict_all(assumptions, MODELS, links, many)
        for table in predicted_tables(rows):
            console.print(table)
        written.append(write_predicted_plot(rows, out))
        record["predicted"] = {
            "measured": False,
            "assumptions": asdict(assumptions),
            "models": [asdict(model) for model in MODELS],
            "break_even": break_even(rows),
            "steps": [asdict(row) for row in rows],
        }
    file = out / "scale.json"
    file.write_text(json.dumps(record, indent=1, allow_nan=False) + "\n")
    for path in [file, *written]:
        console.print(Text(f"Wrote {path}"), soft_wrap=True)
    if interrupted:
        typer.echo("scale: interrupted", err=True)
        raise typer.Exit(_INTERRUPTED)


def _train_all(
    setup: Setup,
    methods: list[Method],
    counts: list[int],
    tuned_at: int,
    seeds: int,
    console: Console,
    finished: list[Trained],
) -> None:
    """Choose each method's learning rate, then train with every number of ranks."""
    runs = len(_RATES) + len(counts) * seeds
    with Progress(console=console, disable=not console.is_terminal) as progress:
        bar = progress.add_task("scale", total=len(methods) * runs * setup.steps)

        def advance() -> None:
            progress.advance(bar)

        for method in methods:
            tries = [
                train(setup, method, tuned_at, seed=0, lr=rate, advance=advance) for rate in _RATES
            ]
            lr = min(tries, key=lambda run: (run.error, run.loss or 0.0)).lr
            for count in counts:
                for seed in range(seeds):
                    run = train(setup, method, count, seed=seed, lr=lr, advance=advance)
                    finished.append(run)
                    console.print(
                        Text(
                            f"{method.name}, {count} ranks: error {100 * run.error:.2f} %, "
                            f"{run.seconds:.0f} s"
                        )
                    )


if __name__ == "__main__":
    app()
