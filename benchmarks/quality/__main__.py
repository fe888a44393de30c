"""The command, see ``--help``."""

import itertools
import math
import multiprocessing
import sys
from collections.abc import Callable
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from pathlib import Path
from typing import Annotated, Any

import typer

from benchmarks.lab.methods import parse_methods
from benchmarks.lab.outcomes import Method
from benchmarks.lab.runs import Run, RunSpec, RunStore
from benchmarks.lab.schedules import SCHEDULES
from benchmarks.lab.search import Tuning
from benchmarks.quality.page import make_cells, make_page, to_json
from benchmarks.quality.rows import rows as page_rows
from benchmarks.quality.runs import TRIES, Found, make_method, make_tuning, with_controls
from benchmarks.quality.settings import COSINE, PRESETS, Setting, build
from benchmarks.quality.tables import write_tables
from comm_hooks.config import unknown
from comm_hooks.launchers.advise.quality import FILE
from comm_hooks.launchers.output import complain, refusing

RESULTS = Path(__file__).parents[1] / "results" / "quality"

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False, rich_markup_mode=None)


@app.command()
def quality(
    rows: Annotated[
        str, typer.Option(metavar="PATTERN", help='Rows of the page, such as "python, 4 x 6*".')
    ] = "*",
    tasks: Annotated[
        str | None,
        typer.Option(metavar="LIST", help=f"In place of the page's rows: {', '.join(PRESETS)}."),
    ] = None,
    ranks: Annotated[str, typer.Option(metavar="LIST", help="With --tasks: ranks.")] = "4",
    batches: Annotated[
        str, typer.Option(metavar="LIST", help="With --tasks: samples per step and rank.")
    ] = "6",
    tokens: Annotated[
        str, typer.Option(metavar="LIST", help="With --tasks: tokens per parameter.")
    ] = "2",
    schedule: Annotated[
        str, typer.Option(help=f"With --tasks, after the warm-up: {' or '.join(SCHEDULES)}.")
    ] = COSINE,
    methods: Annotated[
        str, typer.Option(metavar="LIST", help="With --tasks: methods, besides their controls.")
    ] = "low_communication",
    seeds: Annotated[int, typer.Option(min=1, help="Runs with the best settings.")] = 3,
    tries: Annotated[
        int,
        typer.Option(min=1, help="Learning rates per method, one of them with another momentum."),
    ] = TRIES,
    jobs: Annotated[int, typer.Option(min=0, help="Runs at a time; 0: write the page.")] = 2,
    results: Annotated[Path, typer.Option(help="Where records are kept and the page goes.")] = (
        RESULTS
    ),
) -> None:
    """Train what has no record yet, then write the page.

    A run of 2 tokens per parameter takes one core a minute or two, the whole page two days. Ctrl-C
    loses the runs under way and nothing else. Exit codes: 0, 2 for bad input or missing data, 130
    if interrupted.
    """
    with refusing("quality"):
        if tasks is None:
            chosen = list(page_rows(rows))
            if not chosen:
                raise ValueError(f"--rows: no row matches {rows!r}")
        else:
            for kind, names, known in (
                ("task", tasks.split(","), PRESETS),
                ("schedule", [schedule], SCHEDULES),
            ):
                for name in names:
                    if name not in known:
                        raise ValueError(unknown(kind, name, known))
            combinations = itertools.product(
                tasks.split(","),
                _numbers("--ranks", ranks, int),
                _numbers("--batches", batches, int),
                _numbers("--tokens", tokens, float),
            )
            named = with_controls([pair.spec for pair in parse_methods(methods)])
            chosen = [(Setting(*combination, schedule), named) for combination in combinations]
        for setting, _ in chosen if jobs else ():
            build(setting.task, setting.ranks)
    results.mkdir(parents=True, exist_ok=True)
    runs = RunStore(results / "records.jsonl")
    if jobs:
        made = {(s, name): make_method(s, name) for s, named in chosen for name in named}
        _run(list(made.values()), runs, make_tuning(tries, seeds), jobs)
    _write(results, tries)


def _numbers(option: str, text: str, kind: Callable[[str], Any]) -> list[Any]:
    try:
        numbers = [kind(each) for each in text.split(",")]
    except ValueError:
        raise ValueError(f"{option}: {text!r} is no list of numbers such as 1,2,4") from None
    for number in numbers:
        if not 0 < number < math.inf:
            raise ValueError(f"{option}: {number} is not positive and finite")
    return numbers


def _run(methods: list[Method], runs: RunStore, tuning: Tuning, jobs: int) -> None:
    """Make the missing runs, so many at a time, and keep each as soon as it is there."""
    context = multiprocessing.get_context("spawn")
    waiting: dict[Future[Run], Method] = {}
    specs: dict[Future[Run], RunSpec] = {}
    left = list(methods)
    with ProcessPoolExecutor(jobs, mp_context=context) as pool:
        try:
            while True:
                for method in left:
                    for spec in tuning.next(method, runs):
                        if len(waiting) < jobs and spec not in specs.values():
                            future = pool.submit(method.run, spec)
                            waiting[future], specs[future] = method, spec
                if not waiting:
                    return
                finished, _ = wait(waiting, return_when=FIRST_COMPLETED)
                for future in finished:
                    method, spec = waiting.pop(future), specs.pop(future)
                    try:
                        run = future.result()
                    except ValueError as error:  # a budget that this setting cannot meet, say
                        left.remove(method)
                        complain("quality", f"{method.title}: {error}")
                        continue
                    runs.add(run)
                    loss = "diverged" if run.failure else f"{run.loss:.4f}"
                    made = ", ".join(f"{name} {value:g}" for name, value in run.settings.items())
                    line = f"{method.title}, {made}, seed {run.seed}: {loss}"
                    print(line, file=sys.stderr, flush=True)
        except KeyboardInterrupt:
            pool.shutdown(wait=False, cancel_futures=True)
            complain("quality", "interrupted; what is finished is kept")
            raise typer.Exit(130) from None


def find(runs: RunStore, tries: int = TRIES) -> Found:
    """Return the outcomes of all settings and methods whose search has ended, in their order."""
    order = list(dict.fromkeys(name for _, named in page_rows() for name in named))
    pairs = sorted(
        {(Setting(**run.spec.labels), run.method) for run in runs},
        key=lambda pair: (
            pair[0],
            order.index(pair[1]) if pair[1] in order else len(order),
            pair[1],
        ),
    )
    tuning = make_tuning(tries, 1 + max((run.seed for run in runs), default=0))
    found: Found = {}
    for setting, name in pairs:
        method = make_method(setting, name)
        outcome = tuning.outcome(method, runs)
        if outcome is not None and not tuning.next(method, runs):
            found[setting, name] = outcome
    return found


def _write(results: Path, tries: int) -> None:
    """Write the page of the records; of the repository's, the tables and advise's file, too."""
    found = find(RunStore(results / "records.jsonl"), tries)
    if not found:
        return
    (results.parent / "quality.md").write_text(make_page(found))
    if results == RESULTS:
        write_tables(found)
        FILE.write_text(to_json(make_cells(found)))


if __name__ == "__main__":
    app()
