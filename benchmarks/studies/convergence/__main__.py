"""The command, see ``--help``: its options and its table."""

import math
import statistics
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Annotated

from rich.table import Table

from benchmarks.lab.outcomes import Advance
from benchmarks.lab.search import search
from benchmarks.lab.tables import make_table
from benchmarks.studies import cli
from benchmarks.studies.convergence.descent import Problem, Squared, squared_gradients
from benchmarks.studies.convergence.methods import Method, make_methods
from benchmarks.studies.quadratics import SPECTRA

_FACTOR = 2.0  # between neighbouring constants


@dataclass(frozen=True)
class Row:
    """What a method came to.

    Args:
        method: its name.
        clients: n.
        local_steps: K.
        scale: c, the constant of its learning rate.
        tries: the mean squared gradient of a training of middle length with each c; None if it
            diverged.
        steps: of the trainings, T.
        squared: the mean squared gradient of each, for each seed; None if it diverged.
        largest: the largest squared gradient of each over that of its first step, for each seed;
            None if it diverged.
    """

    method: str
    clients: int
    local_steps: int
    scale: float
    tries: dict[float, float | None]
    steps: Sequence[int]
    squared: Sequence[Sequence[float | None]]
    largest: Sequence[Sequence[float | None]]

    @property
    def means(self) -> list[float | None]:
        """The mean over the seeds for each number of steps; None if one of them diverged."""
        return [
            None if None in own else statistics.mean(value for value in own if value is not None)
            for own in self.squared
        ]

    @property
    def exponent(self) -> float | None:
        """The slope of the line through the logarithms of means against steps."""
        points = [
            (math.log(t), math.log(mean))
            for t, mean in zip(self.steps, self.means, strict=True)
            if mean
        ]
        if len(points) < len(self.steps) or len(points) < 2:
            return None
        return statistics.linear_regression(*zip(*points, strict=True)).slope

    @property
    def is_at_an_edge(self) -> bool:
        """Whether the constant is the largest or the smallest that was tried."""
        return self.scale in (min(self.tries), max(self.tries))


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
        list[int],
        cli.Option("Lengths of trainings.", "100,400,1600,6400", "50,200", least=1, each=int),
    ],
    clients: Annotated[list[int], cli.Option("Of FED-LAMB.", "1,4,16", "1,4", least=1, each=int)],
    local_steps: Annotated[list[int], cli.Option("K of SAFL.", "1,4,16", "1,4", least=1, each=int)],
    seeds: Annotated[int, cli.SEEDS],
    tries: Annotated[
        int,
        cli.Option(
            "Constants c tried per method, on the first seed and a training of middle length; with "
            "3 or more, up to as many again while the best is the largest or smallest.",
            *(7, 3),
            least=1,
        ),
    ],
) -> cli.Measurement:
    """Compare mean squared gradients with the rates that papers state for them.

    Learning rates are c / sqrt(T), with one c for all lengths T; local ones are that over K.
    Writes convergence.json to --out. Exit codes: 0, 2 for bad input, 130 if interrupted (what is
    finished is reported).
    """
    problem = Problem(spectrum, numel, noise)
    lengths = sorted(set(steps))
    middle = lengths[len(lengths) // 2]

    methods = make_methods(clients, local_steps)

    def rows(advance: Advance) -> Iterator[Row]:
        warnings.filterwarnings("ignore", "world size is 1")
        for method in methods:
            yield measure(method, advance)

    def measure(method: Method, advance: Advance) -> Row:
        def descend(scale: float, steps: int, seed: int) -> Squared:
            return squared_gradients(
                problem, method.build, scale=scale, steps=steps, seed=seed, advance=advance
            )

        def judge(scale: float) -> float:
            return descend(scale, middle, 0).mean

        tried = search(judge, method.start, tries, _FACTOR, tries)
        best = min(tried, key=lambda scale: tried[scale])
        found = [[descend(best, t, seed) for seed in range(seeds)] for t in lengths]
        return Row(
            method.name,
            method.clients,
            method.local_steps,
            best,
            {scale: _finite(value) for scale, value in tried.items()},
            lengths,
            [[_finite(one.mean) for one in own] for own in found],
            [[_finite(one.largest) for one in own] for own in found],
        )

    return cli.Measurement(
        len(methods) * (tries * middle + seeds * sum(lengths)),
        rows,
        lambda found: [make_rows_table(found)],
        lambda found: {
            "rows": [
                {
                    **asdict(row),
                    "means": row.means,
                    "exponent": row.exponent,
                    "at an edge": row.is_at_an_edge,
                }
                for row in found
            ]
        },
    )


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None


def make_rows_table(rows: Sequence[Row]) -> Table:
    """Return the table; a star marks a constant at an edge of those tried."""
    cells = [
        (
            row.method,
            str(row.clients),
            str(row.local_steps),
            f"{row.scale:.3g}{'*' * row.is_at_an_edge}",
            *("-" if mean is None else f"{mean:.4f}" for mean in row.means),
            "-" if row.exponent is None else f"{row.exponent:+.2f}",
            _largest(row),
        )
        for row in rows
    ]
    lengths = (f"T = {t:,}" for t in rows[0].steps)
    columns = ("method", "clients", "K", "c", *lengths, "exponent", "largest")
    title = (
        "Mean squared gradient of T rounds of length c / sqrt(T); largest: of all steps, over the "
        "first"
    )
    return make_table(title, columns, cells)


def _largest(row: Row) -> str:
    values = [value for own in row.largest for value in own]
    return "-" if None in values else f"{max(v for v in values if v is not None):.2f}"


app = cli.study(convergence)

if __name__ == "__main__":
    app()
