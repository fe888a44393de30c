"""The command, see ``--help``: its options and its table."""

import math
import statistics
from collections.abc import Sequence
from typing import Annotated

from benchmarks.lab import tables
from benchmarks.lab.outcomes import Outcome
from benchmarks.lab.runs import Point
from benchmarks.studies import cli
from benchmarks.studies.convergence.descent import Problem
from benchmarks.studies.convergence.methods import make_methods
from benchmarks.studies.quadratics import SPECTRA


def convergence(
    numel: Annotated[int, cli.Option("Parameters.", 1024, 64, least=32, check=cli.power_of_two)],
    spectrum: Annotated[
        str, cli.Option(f"Of the Hessian: {', '.join(SPECTRA)}.", "power law", known=[*SPECTRA])
    ],
    noise: Annotated[
        float,
        cli.Option(
            "Standard deviation of the noise of each element of a client's gradient.",
            1.0,
            check=cli.positive,
        ),
    ],
    steps: Annotated[
        list[int], cli.Option("Lengths of trainings.", "100,400,1600,6400", "50,200", least=1)
    ],
    clients: Annotated[list[int], cli.Option("Of FED-LAMB.", "1,4,16", "1,4", least=1)],
    local_steps: Annotated[list[int], cli.Option("K of SAFL.", "1,4,16", "1,4", least=1)],
    seeds: Annotated[int, cli.SEEDS],
    tries: Annotated[
        int,
        cli.Option(
            "Constants c tried per method, on the first seed and the middle T; with 3 or more, "
            "up to as many again while the best is the largest or smallest.",
            *(7, 3),
            least=1,
        ),
    ],
) -> cli.Comparison:
    """Compare mean squared gradients with the rates that papers state for them.

    Learning rates are c / sqrt(T), with one c for all lengths T; local ones are that over K.
    """
    lengths = sorted(set(steps))
    return cli.Comparison(
        make_methods(Problem(spectrum, numel, noise), lengths, clients, local_steps),
        sum(lengths),
        "Mean squared gradient of T rounds of length c / sqrt(T); largest: of all steps, over the "
        "first; *: the largest or smallest c tried",
        lambda outcomes: columns_of(lengths),
        lambda outcome: outcome.name,
        curves=("mean squared gradient", lambda point: point.loss),
        factor=2.0,
    )


def columns_of(lengths: Sequence[int]) -> tables.Columns:
    """Return the columns of the table."""

    def mean(length: int) -> tables.Cell:
        return lambda o: next((f"{p.loss:.4f}" for p in o.mean_curve() if p.round == length), "-")

    return {
        "method": lambda outcome: outcome.name,
        "clients": tables.label("clients"),
        "K": tables.label("K"),
        "c": tables.learning_rate,
        **{f"T = {length:,}": mean(length) for length in lengths},
        "exponent": lambda o: "-" if o.diverged else f"{exponent(o.mean_curve()):+.2f}",
        "largest": _largest,
    }


def exponent(curve: Sequence[Point]) -> float:
    """Return the slope of the line through the logarithms of losses against rounds."""
    points = ((math.log(point.round), math.log(point.loss)) for point in curve)
    return statistics.linear_regression(*zip(*points, strict=True)).slope


def _largest(outcome: Outcome) -> str:
    if outcome.diverged:
        return "-"
    return f"{max(point.error for run in outcome.runs for point in run.curve):.2f}"


app = cli.study(convergence)

if __name__ == "__main__":
    app()
