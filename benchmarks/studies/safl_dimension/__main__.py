"""The command, see ``--help``: its options and its table."""

import itertools
import statistics
from typing import Annotated

from benchmarks.lab import tables
from benchmarks.lab.outcomes import Advance, Method, Outcome
from benchmarks.lab.runs import Point, Tuned
from benchmarks.lab.training import known_warnings_ignored
from benchmarks.studies import cli
from benchmarks.studies.quadratics import SPECTRA, make_quadratic
from benchmarks.studies.safl_dimension.descent import descend
from benchmarks.studies.safl_dimension.methods import BETAS, METHODS
from comm_hooks.compressors import CountSketch


def safl_dimension(
    numels: Annotated[
        list[int],
        cli.Option(
            "Numbers of parameters.", "1024,4096,16384,65536", "512,1024", check=cli.power_of_two
        ),
    ],
    size: Annotated[int, cli.Option("Numbers in a Count-Sketch, b.", 256, 128, least=1)],
    methods: Annotated[
        list[str],
        cli.Option(
            "What is compared; peers get the bytes of the sketch.",
            *(",".join(METHODS), "safl,cd_adam"),
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
) -> cli.Comparison:
    """Count rounds to a given loss on quadratics of more and more parameters."""
    if size > min(numels):
        raise ValueError(f"--size must be at most the smallest of --numels, got {size}")

    def method(spectrum: str, numel: int, name: str) -> Method:
        compared = METHODS[name]
        build = compared.fit(CountSketch(size / numel), numel, limit)

        def train(settings: Tuned, seed: int, advance: Advance) -> list[Point]:
            quadratic = make_quadratic(spectrum, numel, seed)
            with known_warnings_ignored():
                return descend(
                    quadratic,
                    build,
                    settings["lr"],
                    seed,
                    limit=limit,
                    target=target,
                    advance=advance,
                )

        intrinsic = make_quadratic(spectrum, numel, 0).intrinsic_dimension
        labels = {"spectrum": spectrum, "parameters": numel, "intrinsic dimension": intrinsic}
        return Method(name, labels, train, compared.start)

    return cli.Comparison(
        [method(*case) for case in itertools.product(SPECTRA, numels, methods)],
        limit,
        "Rounds to the given share of the loss; *: the largest or smallest rate tried",
        lambda outcomes: columns_of(limit),
        lambda outcome: f"{outcome.labels['spectrum']}, {outcome.labels['parameters']}",
        {"betas": BETAS},
        curves=("loss over the initial one", lambda point: point.error),
        factor=2.0,
    )


def columns_of(limit: int) -> tables.Columns:
    """Return the columns of the table."""

    def each(outcome: Outcome) -> list[str]:
        return [f"> {limit}" if loss > limit else f"{loss:.0f}" for loss in outcome.losses]

    def mean(outcome: Outcome) -> str:
        mean = statistics.mean(outcome.losses)
        return "-" if max(outcome.losses) > limit else f"{mean:.0f}"

    return {
        "method": lambda outcome: outcome.name,
        "spectrum": tables.label("spectrum"),
        "parameters": tables.label("parameters"),
        "intrinsic dimension": tables.label("intrinsic dimension"),
        "rounds": mean,
        "each seed": lambda outcome: ", ".join(each(outcome)),
        "lr": tables.learning_rate,
    }


app = cli.study(safl_dimension)

if __name__ == "__main__":
    app()
