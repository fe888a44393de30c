"""The command, see ``--help``: its options and its tables."""

import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from typing import Annotated

from rich.table import Table

from benchmarks.lab.outcomes import Advance
from benchmarks.lab.tables import format_bytes, make_table
from benchmarks.studies import cli
from benchmarks.studies.scale.methods import make_methods
from benchmarks.studies.scale.training import Setup, Trained, train

_RATES = (0.05, 0.2, 0.8)


def scale(
    ranks: Annotated[
        list[int], cli.Option("Simulated ranks.", "2,4,16,64,256,1024", "2,4,8", least=1)
    ],
    steps: Annotated[int, cli.Option("Training steps.", 30, 10, least=2)],
    batch: Annotated[
        int | None,
        cli.Option(
            "Samples per step of all ranks together. [default: the most ranks, at least 64]",
            None,
            least=1,
        ),
    ],
    density: Annotated[float, cli.Option("Elements that top-k keeps.", 1 / 16)],
    ratio: Annotated[float, cli.Option("Of a Count-Sketch's size to the model's.", 1 / 16)],
    tuned_at: Annotated[
        int,
        cli.Option("Ranks with which each method's learning rate is chosen.", 16, 4, least=1),
    ],
    seeds: Annotated[int, cli.Option("Runs per method and number of ranks.", 1, least=1)],
) -> cli.Measurement:
    """Compare ways to exchange at more and more ranks.

    Simulated ranks learn digits, each from samples of its own and with a residual of its own, with
    the same number of samples per step whatever the number of ranks.
    """
    samples = max(64, *ranks, tuned_at) if batch is None else batch
    for count in (*ranks, tuned_at):
        if samples % count:
            raise ValueError(
                f"--batch {samples} cannot be divided over {count} ranks: give a multiple"
            )
    methods = make_methods(density, ratio)
    setup = Setup(steps, samples)

    def runs(advance: Advance) -> Iterator[Trained]:
        """Choose each method's learning rate, then train with every number of ranks."""
        for method in methods:
            tries = [
                train(setup, method, tuned_at, seed=0, lr=rate, advance=advance) for rate in _RATES
            ]
            lr = min(tries, key=lambda run: (run.error, run.loss or 0.0)).lr
            for count in ranks:
                for seed in range(seeds):
                    yield train(setup, method, count, seed=seed, lr=lr, advance=advance)

    work = len(methods) * (len(_RATES) + len(ranks) * seeds) * steps
    return cli.Measurement(work, runs, make_tables, "runs", asdict(setup))


def make_tables(runs: Sequence[Trained]) -> list[Table]:
    """Return a table of held-out errors and a table of bytes."""
    return [
        _by_ranks("Held-out error, percent, mean over seeds", runs, _error),
        _by_ranks(
            "Sent per rank and step, as much as received",
            runs,
            lambda some: format_bytes(some[0].bytes_sent),
        ),
    ]


def _by_ranks(
    title: str, runs: Sequence[Trained], cell: Callable[[Sequence[Trained]], str]
) -> Table:
    counts = sorted({run.ranks for run in runs})
    rows = []
    for name, lr in dict.fromkeys((run.method, run.lr) for run in runs):
        of_method = [
            [run for run in runs if (run.method, run.ranks) == (name, count)] for count in counts
        ]
        rows.append((name, f"{lr:g}", *(cell(some) if some else "" for some in of_method)))
    return make_table(title, ("method", "lr", *map(str, counts)), rows)


def _error(runs: Sequence[Trained]) -> str:
    if any(run.loss is None for run in runs):
        return "diverged"
    return f"{100 * statistics.mean(run.error for run in runs):.1f}"


app = cli.study(scale)

if __name__ == "__main__":
    app()
