"""The command, see ``--help``: its options, its tables and its plots."""

import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

from matplotlib.axes import Axes
from rich.progress import Progress
from rich.table import Table
from rich.text import Text

from benchmarks.lab.output import Interruption
from benchmarks.lab.plots import BLACK, GREY, new_figure, save, style, write_numbers
from benchmarks.lab.tables import format_bytes, make_table
from benchmarks.studies import cli
from benchmarks.studies.scale.methods import Method, make_methods
from benchmarks.studies.scale.predicted import (
    MODELS,
    Assumptions,
    Predicted,
    break_even,
    predict_all,
)
from benchmarks.studies.scale.training import Setup, Trained, train
from comm_hooks.config import unknown
from comm_hooks.launchers.output import make_console

PARTS = ("simulated", "predicted")
_RATES = (0.05, 0.2, 0.8)


def _of_nodes(option: str, ranks: int) -> None:
    if ranks < 8 or ranks % 8:
        raise ValueError(f"{option} nodes have 8 ranks, so give multiples of 8, got {ranks}")


def scale(
    ranks: Annotated[
        list[int],
        cli.Option("Simulated ranks.", "2,4,16,64,256,1024", "2,4,8", least=1, each=int),
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
            each=int,
            check=_of_nodes,
        ),
    ],
    gigabits: Annotated[
        list[float],
        cli.Option(
            "Gbit/s of a node's link, for predictions.",
            "1,10,100",
            each=float,
            check=cli.positive,
        ),
    ],
    only: Annotated[str, cli.Option(f"One part: {' or '.join(PARTS)}.", "")],
) -> cli.Run:
    """Compare ways to exchange at more and more ranks.

    Simulated ranks learn digits, each from samples of its own and with a residual of its own, with
    the same number of samples per step whatever the number of ranks. Predictions are computed from
    exact bytes and stated assumptions. Writes scale.json and plots to --out. Exit codes: 0, 2 for
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

    def run(place: cli.Place) -> None:
        console = make_console()
        record: dict[str, Any] = {}
        plots: list[Path] = []
        interruption = Interruption()
        if only != "predicted":
            started = time.monotonic()
            finished: list[Trained] = []
            bars = Progress(console=console, disable=not console.is_terminal)
            runs = len(_RATES) + len(ranks) * seeds
            with interruption, bars as progress:
                bar = progress.add_task("scale", total=len(methods) * runs * steps)
                for trained in _train_all(
                    setup, methods, ranks, tuned_at, seeds, lambda: progress.advance(bar)
                ):
                    finished.append(trained)
                    done = f"error {100 * trained.error:.2f} %, {trained.seconds:.0f} s"
                    console.print(Text(f"{trained.method}, {trained.ranks} ranks: {done}"))
            for table in trained_tables(finished):
                console.print(table)
            plots += write_trained_plots(finished, place.out)
            tuning = {"density": density, "ratio": ratio, "tuned_at": tuned_at, "seeds": seeds}
            record["simulated"] = {
                "settings": {**asdict(setup), **tuning},
                "complete": not interruption.happened,
                "seconds": round(time.monotonic() - started),
                "runs": [asdict(each) for each in finished],
            }
        if only != "simulated":
            assumptions = Assumptions()
            rows = predict_all(assumptions, MODELS, gigabits, sorted(set(predicted_ranks)))
            for table in predicted_tables(rows):
                console.print(table)
            plots.append(write_predicted_plot(rows, place.out))
            record["predicted"] = {
                "measured": False,
                "assumptions": asdict(assumptions),
                "models": [asdict(model) for model in MODELS],
                "break_even": break_even(rows),
                "steps": [asdict(row) for row in rows],
            }
        cli.write_record(place, record, console, plots)
        cli.end(place, interruption)

    return run


def _train_all(
    setup: Setup,
    methods: list[Method],
    counts: list[int],
    tuned_at: int,
    seeds: int,
    advance: Callable[[], None],
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
    """Return what was learnt, what was sent, and how far what arrived is from the exact mean."""
    if not runs:
        return []
    return [
        _by_ranks("Held-out error, percent, mean over seeds", runs, _error),
        _by_ranks(
            "Error of the sums over the second half of the steps, what feedback leaves, percent",
            runs,
            lambda some: _percent([run.lasting_error for run in some]),
        ),
        _by_ranks(
            "Error of the mean of one round, percent of its length",
            runs,
            lambda some: _percent([run.round_error for run in some]),
        ),
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


def _percent(shares: Sequence[float | None]) -> str:
    known = [share for share in shares if share is not None]
    return f"{100 * statistics.mean(known):.0f}" if known else "-"


def predicted_tables(rows: Sequence[Predicted]) -> list[Table]:
    """Return a table per model and link, and the break-even points of all."""
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
    points = [
        (
            *(point["scheme"], point["than"], point["model"], f"{point['gigabits']:g}"),
            str(point["ranks"] or "never"),
        )
        for point in break_even(rows)
    ]
    columns = ("method", "slower than", "model", "Gbit/s", "from ranks")
    return [*tables, make_table("Predicted: from how many ranks on", columns, points)]


def write_trained_plots(runs: Sequence[Trained], out: Path) -> list[Path]:
    """Write errors and bytes against ranks; return their paths."""
    if not runs:
        return []
    return [
        _plot_by_ranks(
            runs,
            lambda run: 100 * run.error,
            "held-out error (%)",
            "{:g}".format,
            out / "error-vs-ranks.png",
        ),
        _plot_by_ranks(
            runs,
            lambda run: run.bytes_sent,
            "bytes sent per rank and step",
            format_bytes,
            out / "bytes-vs-ranks.png",
        ),
    ]


def _plot_by_ranks(
    runs: Sequence[Trained],
    y: Callable[[Trained], float],
    label: str,
    write: Callable[[float], str],
    path: Path,
) -> Path:
    figure, (axes,) = new_figure(width=6)
    for index, name in enumerate(dict.fromkeys(run.method for run in runs)):
        own = [run for run in runs if run.method == name]
        counts = sorted({run.ranks for run in own})
        means = [statistics.mean(y(run) for run in own if run.ranks == n) for n in counts]
        if any(means):  # nothing has no place on a logarithmic axis
            axes.plot(counts, means, label=name, **_look(name, index))
    axes.set_yscale("log")
    write_numbers(axes.yaxis, write)
    axes.set_ylabel(label)
    _count_ranks(axes)
    return save(figure, path)


def write_predicted_plot(rows: Sequence[Predicted], out: Path) -> Path:
    """Write step times against ranks, a panel per model and link; return the path."""
    cases = list(dict.fromkeys((row.model, row.gigabits) for row in rows))
    columns = len({gigabits for _, gigabits in cases})
    figure, panels = new_figure(columns, rows=len(cases) // columns, width=3.6)
    schemes = list(dict.fromkeys(row.scheme for row in rows))
    for axes, (model, gigabits) in zip(panels, cases, strict=True):
        some = [row for row in rows if (row.model, row.gigabits) == (model, gigabits)]
        idle = {row.ranks: row.seconds for row in some if not row.bytes_sent}
        for index, scheme in enumerate(schemes):
            own = [row for row in some if row.scheme == scheme]
            axes.plot(
                [row.ranks for row in own],
                [row.seconds / idle[row.ranks] for row in own],
                label=scheme,
                **_look(scheme, index),
            )
        axes.set_yscale("log")
        axes.set_title(f"{model}, {gigabits:g} Gbit/s (predicted)", fontsize="medium")
        _count_ranks(axes)
    for axes in panels[::columns]:
        axes.set_ylabel("step / step without exchange")
        axes.yaxis.set_major_formatter("{x:g}")
    return save(figure, out / "predicted-steps.png")


def _look(name: str, index: int) -> dict[str, Any]:
    """Return the look of a method; the controls, which come first, are black and grey."""
    if name.startswith("no"):
        return {"color": GREY, "linestyle": "dashed"}
    if name.startswith("all-reduce"):
        return {"color": BLACK}
    return {**style(index - 2), "marker": "."}


def _count_ranks(axes: Axes) -> None:
    axes.set_xscale("log", base=2)
    axes.xaxis.set_major_formatter("{x:g}")
    axes.set_xlabel("ranks")


app = cli.study(scale)

if __name__ == "__main__":
    app()
