"""The command; see ``--help``."""

from dataclasses import asdict
from typing import Annotated

from rich.progress import Progress

from benchmarks.studies import cli
from benchmarks.studies.private_moments.figures import make_tables, write_plots
from benchmarks.studies.private_moments.measure import ALPHA, Setup, simulate, steps_by_floor
from comm_hooks.launchers.output import Interruption, make_console


def private_moments(
    coordinates: Annotated[int, cli.Option("With gradients of each strength.", 20_000, least=2)],
    strengths: Annotated[
        list[float],
        cli.Option(
            "Variances of the gradients, over that of the noise.",
            "0,0.01,0.1,1",
            least=0,
            each=float,
        ),
    ],
    at: Annotated[
        list[int],
        cli.Option(
            "Steps after which to measure.", "10,100,1000,5000", "10,100", least=1, each=int
        ),
    ],
    sigma: Annotated[float, cli.Option("The noise multiplier.", 0.4, check=cli.positive)],
    max_grad_norm: Annotated[float, cli.Option("C.", 0.1, check=cli.positive)],
    batch: Annotated[float, cli.Option("B, the expected batch size.", 256.0, check=cli.positive)],
    beta2: Annotated[float, cli.Option("Decay of the second moment.", 0.999)],
    seed: Annotated[int, cli.Option("Of gradients and noise.", 0, least=0)],
) -> cli.Run:
    """Compare what noise does to Adam's second moment with what theory says.

    sigma, C and B are those of the paper's experiment on SNLI. Writes private_moments.json and
    plots to --out. Exit codes: 0, 2 for bad input, 130 if interrupted (nothing is reported).
    """
    if not 0 <= beta2 < 1:
        raise ValueError(f"--beta2 must lie in [0, 1), got {beta2:g}")
    due = sorted(set(at))
    setup = Setup(coordinates, strengths, sigma, max_grad_norm, batch, beta2, seed)

    def run(place: cli.Place) -> None:
        console = make_console()
        bars = Progress(console=console, disable=not console.is_terminal)
        with Interruption() as interruption, bars as progress:
            bar = progress.add_task(place.name, total=due[-1])
            rows, moments = simulate(setup, due, lambda: progress.advance(bar))
        cli.end(place, interruption)
        lengths = steps_by_floor(moments)
        for table in make_tables(rows, lengths, setup):
            console.print(table)
        record = {
            "settings": asdict(setup) | {"alpha": ALPHA, "noise_variance": setup.noise_variance},
            "moments": [asdict(row) for row in rows],
            "steps": [asdict(each) for each in lengths],
        }
        cli.write_record(place, record, console, write_plots(rows, moments, setup, place.out))

    return run


app = cli.study(private_moments)

if __name__ == "__main__":
    app()
