"""The command; see ``--help``."""

import json
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.progress import Progress
from rich.text import Text

from benchmarks.studies import cli
from benchmarks.studies.private_moments.figures import make_tables, write_plots
from benchmarks.studies.private_moments.measure import ALPHA, Setup, simulate, steps_by_floor
from comm_hooks.launchers.output import make_console

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False, rich_markup_mode=None)

_INTERRUPTED = 130  # 128 + SIGINT, as shells have it


@app.command()
def private_moments(
    coordinates: Annotated[int, typer.Option(help="With gradients of each strength.")] = 20_000,
    strengths: Annotated[
        str,
        typer.Option(metavar="LIST", help="Variances of the gradients, over that of the noise."),
    ] = "0,0.01,0.1,1",
    at: Annotated[
        str | None,
        typer.Option(
            metavar="LIST",
            help="Steps after which to measure. [default: 10,100,1000,5000, quick: 10,100]",
        ),
    ] = None,
    sigma: Annotated[float, typer.Option(help="The noise multiplier.")] = 0.4,
    max_grad_norm: Annotated[float, typer.Option(help="C.")] = 0.1,
    batch: Annotated[float, typer.Option(help="B, the expected batch size.")] = 256.0,
    beta2: Annotated[float, typer.Option(help="Decay of the second moment.")] = 0.999,
    seed: Annotated[int, typer.Option(help="Of gradients and noise.")] = 0,
    threads: cli.Threads = 1,
    out: Annotated[Path, typer.Option(help="Folder for the results.")] = Path(
        "comm-hooks-report/private_moments"
    ),
    quick: cli.Quick = False,
) -> None:
    """Compare what noise does to Adam's second moment with what theory says.

    sigma, C and B are those of the paper's experiment on SNLI. Writes private_moments.json and
    plots to --out. Exit codes: 0, 2 for bad input, 130 if interrupted (nothing is reported).
    """
    with cli.bad_input("private_moments"):
        cli.require_at_least(2, coordinates=coordinates)
        cli.require_at_least(0, seed=seed)
        due = sorted(set(cli.parse_numbers("--at", at or _default(quick), int)))
        cli.require_at_least(1, at=due[0])
        levels = cli.parse_numbers("--strengths", strengths, float)
        for level in levels:
            cli.require_at_least(0, strengths=level)
        positive = {"--sigma": sigma, "--max-grad-norm": max_grad_norm, "--batch": batch}
        for option, value in positive.items():
            if not value > 0:
                raise ValueError(f"{option} must be positive, got {value:g}")
        if not 0 <= beta2 < 1:
            raise ValueError(f"--beta2 must lie in [0, 1), got {beta2:g}")
        cli.prepare("cpu", threads, out)

    setup = Setup(coordinates, levels, sigma, max_grad_norm, batch, beta2, seed)
    console = make_console()
    try:
        with Progress(console=console, disable=not console.is_terminal) as progress:
            steps = progress.add_task("private_moments", total=due[-1])
            rows, moments = simulate(setup, due, lambda: progress.advance(steps))
    except KeyboardInterrupt:
        typer.echo("private_moments: interrupted", err=True)
        raise typer.Exit(_INTERRUPTED) from None
    lengths = steps_by_floor(moments)
    for table in make_tables(rows, lengths, setup):
        console.print(table)
    record: dict[str, Any] = {
        "study": "private_moments",
        **cli.describe_machine(),
        "settings": asdict(setup) | {"alpha": ALPHA, "noise_variance": setup.noise_variance},
        "moments": [asdict(row) for row in rows],
        "steps": [asdict(each) for each in lengths],
    }
    file = out / "private_moments.json"
    file.write_text(json.dumps(record, indent=1, allow_nan=False) + "\n")
    for path in [file, *write_plots(rows, moments, setup, out)]:
        console.print(Text(f"Wrote {path}"), soft_wrap=True)


def _default(quick: bool) -> str:
    return "10,100" if quick else "10,100,1000,5000"


if __name__ == "__main__":
    app()
