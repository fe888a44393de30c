"""The command, see ``--help``: its options and its table."""

from collections.abc import Callable, Sequence
from dataclasses import asdict
from typing import Annotated

from rich.table import Table

from benchmarks.lab.tables import tabulate
from benchmarks.studies import cli
from benchmarks.studies.private_moments.measure import ALPHA, Row, Setup, simulate


def private_moments(
    coordinates: Annotated[int, cli.Option("With gradients of each strength.", 20_000, least=2)],
    strengths: Annotated[
        list[float],
        cli.Option(
            "Variances of the gradients, over that of the noise.", "0,0.00016,0.01,0.1,1", least=0
        ),
    ],
    at: Annotated[
        list[int],
        cli.Option("Steps after which to measure.", "10,100,1000,10000", "10,100", least=1),
    ],
    sigma: Annotated[float, cli.Option("The noise multiplier.", 0.4, check=cli.positive)],
    max_grad_norm: Annotated[float, cli.Option("C.", 0.1, check=cli.positive)],
    batch: Annotated[float, cli.Option("B, the expected batch size.", 256.0, check=cli.positive)],
    beta2: Annotated[float, cli.Option("Decay of the second moment.", 0.999)],
    seed: Annotated[int, cli.Option("Of gradients and noise.", 0, least=0)],
) -> cli.Measurement:
    """Compare what noise does to Adam's moments with what theory says.

    sigma, C and B are those of the paper's experiment on SNLI, where gradients have a second moment
    of 0.00016 times the noise's in the mean.
    """
    if not 0 <= beta2 < 1:
        raise ValueError(f"--beta2 must lie in [0, 1), got {beta2:g}")
    due = sorted(set(at))
    setup = Setup(coordinates, strengths, sigma, max_grad_norm, batch, beta2, seed)

    return cli.Measurement(
        due[-1],
        lambda advance: simulate(setup, due, advance),
        lambda rows: [make_rows_table(rows, setup)],
        "moments",
        {**asdict(setup), "alpha": ALPHA, "noise_variance": setup.noise_variance},
    )


def make_rows_table(rows: Sequence[Row], setup: Setup) -> Table:
    """Return the table of second moments."""
    columns: dict[str, Callable[[Row], str]] = {
        "step": lambda row: str(row.step),
        "clean/Phi": lambda row: f"{row.strength:g}",
        "v_hat": lambda row: f"{row.v_hat:.4f}",
        "bias": lambda row: f"{row.bias:+.4f}",
        "spread %": lambda row: f"{100 * row.spread:.3f}",
        "theory %": lambda row: f"{100 * row.theory:.3f}",
        "error": lambda row: f"{row.error:.4f}",
        "theory": lambda row: f"{row.error_theory:.4f}",
        "bound": lambda row: f"{row.bound:.4f}",
        f"{1 - ALPHA:.0%} within": lambda row: f"{row.quantile:.4f}",
        "beyond %": lambda row: f"{100 * row.beyond:.2f}",
        "floored %": lambda row: f"{100 * row.floored:.1f}",
    }
    title = (
        f"Second moments in units of Phi = {setup.noise_variance:.3e}; error: v_hat - Phi - clean"
    )
    return tabulate(title, columns, rows, lambda row: row.step)


app = cli.study(private_moments)

if __name__ == "__main__":
    app()
