"""The command, see ``--help``: its options and its table."""

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
from benchmarks.studies.quadratics import SPECTRA, make_quadratic
from benchmarks.studies.safl_dimension.descent import Descent, descend
from benchmarks.studies.safl_dimension.methods import BETAS, METHODS
from comm_hooks.compressors import CountSketch

_FACTOR = 2.0  # between neighbouring learning rates


@dataclass(frozen=True)
class Row:
    """What a method took on one spectrum and number of parameters.

    Args:
        method, spectrum, numel: which.
        intrinsic: the intrinsic dimension.
        tries: the trainings that the learning rate was chosen by, all with seed 0.
        runs: with that learning rate, one per seed.
    """

    method: str
    spectrum: str
    numel: int
    intrinsic: float
    tries: Sequence[Descent]
    runs: Sequence[Descent]

    @property
    def mean(self) -> float | None:
        """The mean number of rounds; None if a seed did not arrive."""
        rounds = [run.rounds for run in self.runs]
        return None if None in rounds else statistics.mean(r for r in rounds if r is not None)

    @property
    def is_at_an_edge(self) -> bool:
        """Whether the learning rate is the largest or the smallest that was tried."""
        rates = [attempt.lr for attempt in self.tries]
        return self.runs[0].lr in (min(rates), max(rates))


def safl_dimension(
    numels: Annotated[
        list[int],
        cli.Option(
            "Numbers of parameters.",
            "1024,4096,16384,65536",
            "512,1024",
            each=int,
            check=cli.power_of_two,
        ),
    ],
    size: Annotated[int, cli.Option("Numbers in a Count-Sketch, b.", 256, 128, least=1)],
    methods: Annotated[
        list[str],
        cli.Option(
            "What is compared; peers get the bytes of the sketch.",
            *(",".join(METHODS), "safl,cd_adam"),
            each=str,
            known=[*METHODS],
        ),
    ],
    target: Annotated[
        float, cli.Option("The share of the loss to reach.", 0.1, check=cli.fraction)
    ],
    limit: Annotated[int, cli.Option("Rounds at most.", 1000, 200, least=1)],
    seeds: Annotated[int, cli.SEEDS],
    tries: Annotated[
        int,
        cli.Option(
            "Learning rates tried per row, on the first seed; with 3 or more, up to as many again "
            "while the best is the largest or smallest.",
            *(7, 3),
            least=1,
        ),
    ],
) -> cli.Measurement:
    """Count rounds to a given loss on quadratics of more and more parameters.

    Writes safl_dimension.json to --out. Exit codes: 0, 2 for bad input, 130 if
    interrupted (what is finished is reported).
    """
    if size > min(numels):
        raise ValueError(f"--size must be at most the smallest of --numels, got {size}")

    cases = [(m, s, numel) for m in methods for s in SPECTRA for numel in numels]

    def rows(advance: Advance) -> Iterator[Row]:
        warnings.filterwarnings("ignore", "world size is 1")
        for case in cases:
            yield measure(*case, advance)

    def measure(method: str, spectrum: str, numel: int, advance: Advance) -> Row:
        compared = METHODS[method]
        build = compared.fit(CountSketch(size / numel), numel, limit)
        done: list[Descent] = []

        def descent(lr: float, seed: int) -> Descent:
            quadratic = make_quadratic(spectrum, numel, seed)
            return descend(quadratic, build, lr, seed, limit=limit, target=target, advance=advance)

        def cost(lr: float) -> float:
            done.append(descent(lr, 0))
            return done[-1].cost(limit)

        search(cost, compared.start, tries, _FACTOR, tries)
        best = min(done, key=lambda attempt: attempt.cost(limit))
        runs = [best, *(descent(best.lr, seed) for seed in range(1, seeds))]
        intrinsic = make_quadratic(spectrum, numel, 0).intrinsic_dimension
        return Row(method, spectrum, numel, intrinsic, tuple(done), tuple(runs))

    return cli.Measurement(
        len(cases) * limit * (tries + seeds - 1),
        rows,
        lambda found: [make_rows_table(found, limit)],
        lambda found: {
            "rows": [
                {**asdict(row), "mean": row.mean, "at an edge": row.is_at_an_edge} for row in found
            ]
        },
        settings={"betas": BETAS},
    )


def make_rows_table(rows: Sequence[Row], limit: int) -> Table:
    """Return the table; a star marks a learning rate at an edge of those tried."""
    cells = [
        (
            row.method,
            row.spectrum,
            f"{row.numel:,}",
            f"{row.intrinsic:,.1f}",
            "-" if row.mean is None else f"{row.mean:.0f}",
            ", ".join(f"> {limit}" if r.rounds is None else str(r.rounds) for r in row.runs),
            f"{row.runs[0].lr:.3g}{'*' * row.is_at_an_edge}",
        )
        for row in rows
    ]
    columns = (
        "method",
        "spectrum",
        "parameters",
        "intrinsic dimension",
        "rounds",
        "each seed",
        "lr",
    )
    return make_table("Rounds to the given share of the loss", columns, cells)


app = cli.study(safl_dimension)

if __name__ == "__main__":
    app()
