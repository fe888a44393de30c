"""The command, see ``--help``."""

import itertools
import math
import multiprocessing
import sys
from collections.abc import Callable
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Annotated, Any

import typer

from benchmarks.lab.methods import parse_method
from benchmarks.lab.outcomes import Method
from benchmarks.lab.runs import BASELINE, CONTROL, Run, RunSpec, RunStore
from benchmarks.lab.schedules import SCHEDULES
from benchmarks.lab.search import Tuning
from benchmarks.quality.page import make_cells, make_page, to_json
from benchmarks.quality.runs import METHODS, Found, make_method, make_tuning
from benchmarks.quality.settings import COSINE, PRESETS, Setting, build
from comm_hooks.config import unknown
from comm_hooks.launchers.advise.quality import FILE
from comm_hooks.launchers.output import complain, refusing

RESULTS = Path(__file__).parents[1] / "results" / "quality"

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False, rich_markup_mode=None)


@app.command()
def quality(
    tasks: Annotated[
        str, typer.Option(metavar="LIST", help=f"Of {', '.join(PRESETS)}.")
    ] = "python,c,prose,images",
    ranks: Annotated[str, typer.Option(metavar="LIST", help="Numbers of ranks.")] = "4",
    batches: Annotated[
        str, typer.Option(metavar="LIST", help="Samples per step and rank.")
    ] = "6,32",
    tokens: Annotated[str, typer.Option(metavar="LIST", help="Tokens per parameter.")] = "2",
    schedule: Annotated[
        str, typer.Option(help=f"After the warm-up: {' or '.join(SCHEDULES)}.")
    ] = COSINE,
    only: Annotated[str, typer.Option(help="Methods of the list that match, besides controls.")] = (
        "*"
    ),
    method: Annotated[
        list[str] | None, typer.Option(help="Methods that are not on the list; LR@METHOD.")
    ] = None,
    seeds: Annotated[int, typer.Option(min=1, help="Runs with the best learning rate.")] = 3,
    tries: Annotated[int, typer.Option(min=1, help="Learning rates, on the first seed.")] = 3,
    jobs: Annotated[int, typer.Option(min=0, help="Runs at a time; 0: write the page.")] = 2,
    results: Annotated[Path, typer.Option(help="Where records are kept and the page goes.")] = (
        RESULTS
    ),
) -> None:
    """Train what has no record yet, then write the page.

    A run of 2 tokens per parameter takes one core a minute or two. Ctrl-C loses the runs under
    way and nothing else. Exit codes: 0, 2 for bad input or missing data, 130 if interrupted.
    """
    with refusing("quality"):
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
        settings = [Setting(*combination, schedule) for combination in combinations]
        matching = {name for name in METHODS if fnmatchcase(name, only)}
        if not matching:
            raise ValueError(f"--only: none of {', '.join(METHODS)} matches {only!r}")
        chosen = {n: lr for n, lr in METHODS.items() if n in matching | {BASELINE, CONTROL}}
        chosen |= dict(map(_parse, method or ()))
        for name in chosen:
            parse_method(name)
        for each in settings if jobs else ():
            build(each.task, each.ranks)
    methods = [
        make_method(setting, name, start) for setting in settings for name, start in chosen.items()
    ]
    results.mkdir(parents=True, exist_ok=True)
    runs = RunStore(results / "records.jsonl")
    if jobs:
        _run(methods, runs, make_tuning(tries, seeds), jobs)
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


def _parse(text: str) -> tuple[str, float]:
    start, _, name = text.partition("@")
    try:
        rate = float(start)
    except ValueError:
        raise ValueError(f"--method: {text!r} is not of the form LR@METHOD") from None
    if not 0 < rate < math.inf:
        raise ValueError(f"--method: the learning rate of {text!r} is not positive and finite")
    return name, rate


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
                    made = f"lr {run.settings['lr']:g}, seed {run.seed}"
                    print(f"{method.title}, {made}: {loss}", file=sys.stderr, flush=True)
        except KeyboardInterrupt:
            pool.shutdown(wait=False, cancel_futures=True)
            complain("quality", "interrupted; what is finished is kept")
            raise typer.Exit(130) from None


def find(runs: RunStore, tries: int = 3) -> Found:
    """Return the outcomes of all settings and methods that have finished runs, in their order."""
    order = list(METHODS)
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
        outcome = tuning.outcome(make_method(setting, name, METHODS.get(name, 4e-3)), runs)
        if outcome is not None:
            found[setting, name] = outcome
    return found


def _write(results: Path, tries: int) -> None:
    """Write the page of all records and seeds; from the records of the repository ``advise``'s."""
    found = find(RunStore(results / "records.jsonl"), tries)
    if not found:
        return
    (results.parent / "quality.md").write_text(make_page(found))
    if results == RESULTS:
        FILE.write_text(to_json(make_cells(found)))


if __name__ == "__main__":
    app()
