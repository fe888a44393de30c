"""The command, see ``--help``: its options and its table."""

import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from typing import Annotated, Any

from rich.table import Table

from benchmarks.lab.outcomes import Advance
from benchmarks.lab.tables import format_bytes, make_table
from benchmarks.studies import cli
from benchmarks.studies.scale.methods import Method, make_methods
from benchmarks.studies.scale.predicted import (
    MODELS,
    Assumptions,
    Predicted,
    predict_all,
)
from benchmarks.studies.scale.training import Setup, Trained, train
from comm_hooks.config import unknown

PARTS = ("simulated", "predicted")
_RATES = (0.05, 0.2, 0.8)


def _of_nodes(option: str, ranks: int) -> None:
    if ranks < 8 or ranks % 8:
        raise ValueError(f"{option} nodes have 8 ranks, so give multiples of 8, got {ranks}")


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
    predicted_ranks: Annotated[
        list[int],
        cli.Option(
            "Ranks to predict step times for.",
            "8,16,32,64,128,256,512,1024,2048,4096",
            check=_of_nodes,
        ),
    ],
    gigabits: Annotated[
        list[float],
        cli.Option("Gbit/s of a node's link, for predictions.", "1,10,100", check=cli.positive),
    ],
    only: Annotated[str, cli.Option(f"One part: {' or '.join(PARTS)}.", "")],
) -> cli.Measurement:
    """Compare ways to exchange at more and more ranks.

    Simulated ranks learn digits, each from samples of its own and with a residual of its own, with
    the same number of samples per step whatever the number of ranks. Predictions are computed from
    exact bytes and stated assumptions. Writes scale.json to --out. Exit codes: 0, 2 for
    bad input, 130 if interrupted (what is finished is reported).
    """
    if only and only not in PARTS:
        raise ValueError(f"--only: {unknown('part', only, PARTS)}")
    samples = max(64, *ranks, tuned_at) if batch is None else batch
    for count in (*ranks, tuned_at):
        if samples % count:
            raise ValueError(
                f"--batch {samples} cannot be divided over {count} ranks: give a multiple"
            )
    methods = make_methods(density, ratio)
    setup = Setup(steps, samples)

    def rows(advance: Advance) -> Iterator[Trained | Predicted]:
        if only != "predicted":
            yield from _train_all(setup, methods, ranks, tuned_at, seeds, advance)
        if only != "simulated":
            yield from predict_all(Assumptions(), MODELS, gigabits, sorted(set(predicted_ranks)))

    def record(rows: list[Trained | Predicted]) -> dict[str, Any]:
        trained, predicted = _split(rows)
        found: dict[str, Any] = {}
        if trained:
            tuning = {"density": density, "ratio": ratio, "tuned_at": tuned_at, "seeds": seeds}
            found["simulated"] = {
                "settings": {**asdict(setup), **tuning},
                "runs": [asdict(each) for each in trained],
            }
        if predicted:
            found["predicted"] = {
                "measured": False,
                "assumptions": asdict(Assumptions()),
                "models": [asdict(model) for model in MODELS],
                "steps": [asdict(row) for row in predicted],
            }
        return found

    def tables(rows: list[Trained | Predicted]) -> list[Table]:
        trained, predicted = _split(rows)
        return trained_tables(trained) + predicted_tables(predicted)

    work = len(methods) * (len(_RATES) + len(ranks) * seeds) * steps
    return cli.Measurement(work, rows, tables, record)


def _split(rows: Sequence[Trained | Predicted]) -> tuple[list[Trained], list[Predicted]]:
    trained = [row for row in rows if isinstance(row, Trained)]
    return trained, [row for row in rows if isinstance(row, Predicted)]


def _train_all(
    setup: Setup,
    methods: list[Method],
    counts: list[int],
    tuned_at: int,
    seeds: int,
    advance: Advance,
) -> Iterator[Trained]:
    """Choose each method's learning rate, then train with every number of ranks."""
    for method in methods:
        tries = [
            train(setup, method, tuned_at, seed=0, lr=rate, advance=advance) for rate in _RATES
        ]
        lr = min(tries, key=lambda run: (run.error, run.loss or 0.0)).lr
        for count in counts:
            for seed in range(seeds):
                yield train(setup, method, count, seed=seed, lr=lr, advance=advance)


def trained_tables(runs: Sequence[Trained]) -> list[Table]:
    """Return a table of held-out errors and a table of bytes."""
    if not runs:
        return []
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


def predicted_tables(rows: Sequence[Predicted]) -> list[Table]:
    """Return a table for each model and link."""
    tables = []
    counts = sorted({row.ranks for row in rows})
    for model, gigabits in dict.fromkeys((row.model, row.gigabits) for row in rows):
        some = [row for row in rows if (row.model, row.gigabits) == (model, gigabits)]
        fastest = {
            count: min(
                (row for row in some if row.ranks == count and row.bytes_sent),
                key=lambda row: row.seconds,
            )
            for count in counts
        }
        cells = [
            (
                scheme,
                *(
                    f"{1e3 * row.seconds:,.0f}" + "*" * (fastest[row.ranks] is row)
                    for row in some
                    if row.scheme == scheme
                ),
            )
            for scheme in dict.fromkeys(row.scheme for row in some)
        ]
        title = (
            f"Predicted, not measured: {model} parameters, {gigabits:g} Gbit/s between nodes of 8, "
            "ms per step; *: the fastest that communicates"
        )
        tables.append(make_table(title, ("method", *map(str, counts)), cells))
    return tables


app = cli.study(scale)

if __name__ == "__main__":
    app()
