"""The command, see ``--help``."""

import math
import multiprocessing
import sys
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Annotated

import typer

from benchmarks.lab.methods import parse_method
from benchmarks.lab.runs import BASELINE, CONTROL
from benchmarks.lab.schedules import SCHEDULES
from benchmarks.quality.cells import make_cells, to_json
from benchmarks.quality.methods import METHODS
from benchmarks.quality.options import RESULTS, Batches, Ranks, Tasks, Tokens, parse_settings
from benchmarks.quality.page import make_page, write_picture
from benchmarks.quality.runs import Record, Wanted, perform, read_records
from benchmarks.quality.settings import COSINE, Setting, build
from benchmarks.quality.tuning import Entry, by_wanted
from comm_hooks.launchers.advise.quality import FILE
from comm_hooks.launchers.output import complain, refusing

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False, rich_markup_mode=None)


@app.command()
def quality(
    tasks: Tasks = "python,c,prose,images",
    ranks: Ranks = "4",
    batches: Batches = "6,32",
    tokens: Tokens = "2",
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
    processes: Annotated[
        bool, typer.Option(help="Each rank a process of its own; else they take turns in one.")
    ] = False,
    results: Annotated[Path, typer.Option(help="Where records are kept and the page goes.")] = (
        RESULTS
    ),
) -> None:
    """Train what has no record yet, then write the page.

    A run of 2 tokens per parameter takes one core a minute or two. Ctrl-C loses the runs under
    way and nothing else. Exit codes: 0, 2 for bad input or missing data, 130 if interrupted.
    """
    with refusing("quality"):
        settings = parse_settings(tasks, ranks, batches, tokens, schedule)
        matching = {name for name in METHODS if fnmatchcase(name, only)}
        if not matching:
            raise ValueError(f"--only: none of {', '.join(METHODS)} matches {only!r}")
        chosen = {n: lr for n, lr in METHODS.items() if n in matching | {BASELINE, CONTROL}}
        chosen |= dict(map(_parse, method or ()))
        for name in chosen:
            parse_method(name)
        for each in settings if jobs else ():
            build(each.task, each.ranks)
        records = by_wanted(read_records(results / "records.jsonl"))
    entries = [
        Entry(setting, name, start, tries, range(seeds))
        for setting in settings
        for name, start in chosen.items()
    ]
    results.mkdir(parents=True, exist_ok=True)
    if jobs:
        _run(entries, dict(records), results / "records.jsonl", jobs, processes)
    _write(results, tries)


def _parse(text: str) -> tuple[str, float]:
    start, _, name = text.partition("@")
    try:
        rate = float(start)
    except ValueError:
        raise ValueError(f"--method: {text!r} is not of the form LR@METHOD") from None
    if not 0 < rate < math.inf:
        raise ValueError(f"--method: the learning rate of {text!r} is not positive and finite")
    return name, rate


def _run(
    entries: list[Entry], records: dict[Wanted, Record], path: Path, jobs: int, processes: bool
) -> None:
    """Make the missing runs, so many at a time, adding each record as soon as it is there."""
    context = multiprocessing.get_context("spawn")
    waiting: dict[Future[Record], Wanted] = {}
    refused: set[tuple[Setting, str]] = set()
    with ProcessPoolExecutor(jobs, mp_context=context) as pool:
        try:
            while True:
                left = [e for e in entries if (e.setting, e.method) not in refused]
                wanted = (each for entry in left for each in entry.next(records))
                for each in dict.fromkeys(wanted):
                    if len(waiting) < jobs and each not in waiting.values():
                        waiting[pool.submit(perform, each, processes=processes)] = each
                if not waiting:
                    return
                finished, _ = wait(waiting, return_when=FIRST_COMPLETED)
                for future in finished:
                    each = waiting.pop(future)
                    try:
                        record = future.result()
                    except ValueError as error:  # a budget that this setting cannot meet, say
                        refused.add((each.setting, each.method))
                        complain("quality", f"{each.setting}: {each.method}: {error}")
                        continue
                    records[each] = record
                    with path.open("a") as file:
                        file.write(record.to_json() + "\n")
                    print(_summary(record), file=sys.stderr, flush=True)
        except KeyboardInterrupt:
            pool.shutdown(wait=False, cancel_futures=True)
            complain("quality", "interrupted; what is finished is kept")
            raise typer.Exit(130) from None


def _summary(record: Record) -> str:
    wanted = record.wanted
    loss = "diverged" if record.loss is None else f"{record.loss:.4f}"
    return (
        f"{wanted.setting}, seed {wanted.seed}: {wanted.method}, lr {wanted.lr:g}: {loss}, "
        f"{record.bits:.3g} bits, {record.seconds:.0f} s"
    )


def _write(results: Path, tries: int) -> None:
    """Write the page and the picture of all records and seeds, whatever was asked for now.

    From the records that are kept here comes what ``comm-hooks advise`` knows, too.
    """
    records = by_wanted(read_records(results / "records.jsonl"))
    order = list(METHODS)
    pairs = sorted(
        {(w.setting, w.method) for w in records},
        key=lambda pair: (pair[0], order.index(pair[1]) if pair[1] in order else len(order)),
    )
    if not records:
        return
    seeds = range(1 + max(wanted.seed for wanted in records))
    entries = [Entry(s, m, METHODS.get(m, 4e-3), tries, seeds) for s, m in pairs]
    (results.parent / "quality.md").write_text(make_page(entries, records))
    write_picture(entries, records, results / "share-vs-bits.png")
    if results == RESULTS:
        FILE.write_text(to_json(make_cells(entries, records)))


if __name__ == "__main__":
    app()
