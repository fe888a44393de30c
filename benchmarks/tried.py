"""Every pair of compression and optimizer that was tried, and what each costs in loss.

    python benchmarks/tried.py                    # runs what is missing, then writes the page
    python benchmarks/tried.py --only 'sign+*' --seeds 0 1 --jobs 2
    python benchmarks/tried.py --jobs 0           # runs nothing

Trains the GPT of ``python -m benchmarks.compare`` on 2 ranks, each with its own half of the text, in the same
processes and with the same settings, and keeps every run's record in
``benchmarks/results/tried/``, beside ``methods.json``, the list of what to run and why. A run that
has a record is not repeated, so that the list can grow. ``benchmarks/results/tried.md`` is made of
the records; losses are compared with those of ``all_reduce`` and ``none`` with the same seed, which
have the same weights and batches.

A run takes two cores for one to two minutes per 150 steps. Ctrl-C ends after the runs under way.
"""

import argparse
import datetime
import json
import platform
import statistics
import sys
import tempfile
import threading
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from fnmatch import fnmatchcase
from operator import itemgetter
from pathlib import Path

from benchmarks.lab.corpus import load_corpus
from benchmarks.lab.machine import processor
from benchmarks.lab.methods import parse_method, parse_methods
from benchmarks.lab.options import describe_training, versions
from benchmarks.lab.processes import available_cores, run_method, threads_per_rank
from benchmarks.lab.runs import Figures, Run, Settings
from benchmarks.report.reading import read_runs

RESULTS = Path(__file__).parent / "results"

_NOISE = 0.03
"""Differences between two runs of one seed that say nothing; those of means shrink as 1/sqrt(n)."""
_STALL_SECONDS = 900.0
"""Without any event for so long a run is given up; busy machines are slow."""


@dataclass(frozen=True)
class Tried:
    """An entry of the list."""

    method: str
    """As ``python -m benchmarks.compare --hooks`` takes it."""
    why: str
    """What it is, and why it was tried."""
    seeds: Mapping[int, Sequence[int]]
    """By number of steps."""


@dataclass(frozen=True)
class Job:
    """One run that is wanted."""

    method: str
    settings: Settings


def read_methods(path: Path) -> list[Tried]:
    """Read the list: an array of objects with "method", "why" and "seeds" by number of steps.

    Raises:
        ValueError: if a method is not known or is there twice; the message names it.
    """
    entries = json.loads(path.read_text())
    parse_methods(",".join(entry["method"] for entry in entries))
    return [
        Tried(e["method"], e["why"], {int(steps): seeds for steps, seeds in e["seeds"].items()})
        for e in entries
    ]


def make_jobs(
    methods: Iterable[Tried], seeds: Sequence[int] | None, steps: int | None
) -> list[Job]:
    """Return the runs that the list asks for, the first seed of every method first.

    Args:
        seeds: in place of those of the list.
        steps: only runs of so many steps; None for all.
    """
    jobs = [
        # Three points of each curve: evaluating takes time, and changes nothing.
        (
            place,
            Job(
                tried.method,
                Settings(steps=length, seed=seed, eval_every=length // 3, schedule="constant"),
            ),
        )
        for tried in methods
        for length, listed in tried.seeds.items()
        if steps in (None, length)
        for place, seed in enumerate(listed if seeds is None else seeds)
    ]
    return [job for _, job in sorted(jobs, key=itemgetter(0))]


def read_records(folder: Path) -> list[Run]:
    """Return all records of a folder."""
    return read_runs(*sorted(folder.glob("*.jsonl")))


def run_missing(jobs: Sequence[Job], folder: Path, corpus: Path, workers: int) -> list[Run]:
    """Run the jobs that have no record, some at the same time, and return those that failed.

    Diverging is a result and gets a record; a run that failed otherwise gets none.

    Args:
        folder: where the records are, one file for each number of steps.
        corpus: the file with the text.
        workers: how many runs at a time, each of ``nproc`` processes.
    """
    folder.mkdir(parents=True, exist_ok=True)
    known = {(run.method, run.settings) for run in read_records(folder)}
    missing = [job for job in jobs if (job.method, job.settings) not in known]
    writing = threading.Lock()

    def run(job: Job) -> Run:
        with tempfile.NamedTemporaryFile(suffix=".log") as log:
            record = run_method(
                parse_method(job.method),
                job.settings,
                corpus,
                Path(log.name),
                lambda event: None,
                timeout=_STALL_SECONDS,
            )
        record.facts = make_facts(job.settings)
        with writing:
            print(_summary(job, record), file=sys.stderr, flush=True)
            if record.figures or is_diverged(record):
                with (folder / f"{job.settings.steps}-steps.jsonl").open("a") as records:
                    records.write(record.to_json() + "\n")
        return record

    with ThreadPoolExecutor(workers) as pool:
        try:
            finished = list(pool.map(run, missing))
        except KeyboardInterrupt:
            pool.shutdown(wait=False, cancel_futures=True)
            raise
    return [record for record in finished if record.failure and not is_diverged(record)]


def is_diverged(run: Run) -> bool:
    """Return whether the run ended because a loss was not finite."""
    return run.failure is not None and "diverged" in run.failure


def make_facts(settings: Settings) -> dict[str, str]:
    """Return where and when a run was made."""
    return {
        "Date": f"{datetime.datetime.now(datetime.timezone.utc):%Y-%m-%d}",
        **describe_training(settings),
        "Machine": f"{available_cores()} cores ({processor()}, {platform.system()}), "
        f"OMP_NUM_THREADS={threads_per_rank(settings.nproc)}, gloo over loopback",
        "Versions": versions(),
    }


def _summary(job: Job, run: Run) -> str:
    name = f"{job.method}, {job.settings.steps} steps, seed {job.settings.seed}"
    if run.figures is None:
        return f"{name}: {run.failure}"
    return f"{name}: loss {run.figures.loss:.3f}, {run.figures.sent_per_step / 1e3:,.1f} kB"


@dataclass(frozen=True)
class Row:
    """One method at one number of steps: what all its seeds say together."""

    method: str
    losses: dict[int, float]
    """By seed; infinite where the run diverged."""
    sent: float
    """Bytes per step and rank in the whole run."""
    sent_warm: float
    """The same after the warm-up."""

    @property
    def loss(self) -> float:
        return statistics.mean(self.losses.values())

    def minus(self, other: "Row | None") -> float | None:
        """Return the mean difference over the seeds that both have; None if there is none."""
        shared = self.shared_seeds(other)
        if other is None or not shared:
            return None
        return statistics.mean(self.losses[seed] - other.losses[seed] for seed in shared)

    def shared_seeds(self, other: "Row | None") -> set[int]:
        """Return the seeds that both have."""
        return self.losses.keys() & other.losses.keys() if other else set()


def make_rows(runs: Iterable[Run], steps: int) -> list[Row]:
    """Return one row per method, best first."""
    by_method: dict[str, dict[int, Figures | None]] = {}
    for run in runs:
        if isinstance(run.settings, Settings) and run.settings.steps == steps:
            by_method.setdefault(run.method, {})[run.settings.seed] = run.figures
    rows = []
    for method, by_seed in by_method.items():
        figures = [f for f in by_seed.values() if f]
        rows.append(
            Row(
                method,
                {s: f.loss if f else float("inf") for s, f in sorted(by_seed.items())},
                statistics.mean(f.bytes_sent for f in figures) / steps if figures else 0.0,
                statistics.mean(f.sent_per_step for f in figures) if figures else 0.0,
            )
        )
    return sorted(rows, key=lambda row: row.loss)


def verdict(row: Row, rows: Sequence[Row]) -> str:
    """Return in words what a method is worth, judged by the controls among the rows."""
    controls = {other.method: other for other in rows if other.method in ("all_reduce", "none")}
    if row.method in controls:
        return "control"
    gap, gain = (row.minus(controls.get(name)) for name in ("all_reduce", "none"))
    if row.loss == float("inf"):
        return "diverges"
    if gap is None or gain is None:
        return "no control with this seed"
    noise = _NOISE / len(row.shared_seeds(controls["all_reduce"])) ** 0.5
    if gap < -noise:
        words = "better than all-reduce"
    elif gap <= noise:
        words = "as good as all-reduce"
    elif gain > noise:
        words = "worse than not exchanging"
    elif gain > -noise:
        words = "no better than not exchanging"
    else:
        words = f"{100 * gain / (gain - gap):.0f} % of what exchanging is worth"
    better = [o for o in rows if o is not row and o.loss <= row.loss and o.sent <= row.sent]
    return words if better or gain > -noise else f"**{words}; nothing thinner is as good**"


def _format(value: float | None, pattern: str) -> str:
    return "" if value is None else format(value, pattern)


def make_table(rows: Sequence[Row]) -> str:
    """Return the Markdown table of these rows."""
    controls = {row.method: row for row in rows}
    lines = [
        "| method | kB per step, whole run | after warm-up | loss | each seed | - all-reduce "
        "| - none | verdict |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        seeds = ", ".join(f"{loss:.3f}" for loss in row.losses.values())
        gap, gain = row.minus(controls.get("all_reduce")), row.minus(controls.get("none"))
        lines.append(
            f"| `{row.method}` | {row.sent / 1e3:,.1f} | {row.sent_warm / 1e3:,.1f} "
            f"| {row.loss:.3f} | {seeds} | {_format(gap, '+.3f')} | {_format(gain, '+.3f')} "
            f"| {verdict(row, rows)} |"
        )
    return "\n".join(lines)


_HEAD = """\
# What was tried

{training}.
2 ranks, each with its own half of the text (the source of Python's standard library), judged on all
of it. Losses are nats per byte; columns with a minus are differences to the control, in the mean
over the seeds that both have. With one seed, differences below 0.03 say nothing. Bytes are those
that one rank sends. "Nothing thinner is as good": no row has both fewer bytes and a lower loss.

`python benchmarks/tried.py` makes this page, and runs what has no record in
`benchmarks/results/tried/`. Methods are written as `python -m benchmarks.compare --hooks` takes them and have
the learning rates that it gives them, where the row says no other: those of SGD, which most of the
last rows are, were not tuned to this task, and gain from more steps than these.
Measured {dates} on {machine}.
"""


def make_page(runs: Sequence[Run], methods: Sequence[Tried], prototypes: str) -> str:
    """Return the page that these records make."""
    facts = [run.facts for run in runs]
    lengths = sorted({run.settings.steps for run in runs if isinstance(run.settings, Settings)})
    parts = [
        _HEAD.format(
            training=facts[0]["Model"],
            dates=" to ".join(
                sorted({min(f["Date"] for f in facts), max(f["Date"] for f in facts)})
            ),
            machine="; ".join(sorted({fact["Machine"] for fact in facts})),
        )
    ]
    for steps in lengths:
        parts.append(f"## {steps} steps\n\n{make_table(make_rows(runs, steps))}\n")
    done = {run.method for run in runs}
    for title, is_done in (("What each is, and why it was tried", True), ("Not run yet", False)):
        entries = [tried for tried in methods if (tried.method in done) is is_done]
        if entries:
            notes = "\n".join(f"* `{tried.method}`: {tried.why}" for tried in entries)
            parts.append(f"## {title}\n\n{notes}\n")
    parts.append(prototypes)
    return "\n".join(parts)


def main() -> None:
    """Run what is missing and write the page. Exit code 1 if a run failed without a result."""
    parser = argparse.ArgumentParser(description="What every method that was tried costs in loss.")
    parser.add_argument("--only", default="*", metavar="PATTERN", help="such as 'topk*+local_*'")
    parser.add_argument("--seeds", type=int, nargs="+", help="in place of those of the list")
    parser.add_argument("--steps", type=int, help="only runs of so many steps")
    parser.add_argument("--jobs", type=int, default=1, help="runs at a time; 0: write the page")
    parser.add_argument("--results", type=Path, default=RESULTS, help="where the page goes")
    arguments = parser.parse_args()
    if arguments.jobs < 0:
        parser.error(f"--jobs must be at least 0, got {arguments.jobs}")
    records = arguments.results / "tried"
    try:
        methods = read_methods(records / "methods.json")
    except (OSError, ValueError) as error:
        parser.error(str(error))
    failed: list[Run] = []
    if arguments.jobs:
        chosen = [tried for tried in methods if fnmatchcase(tried.method, arguments.only)]
        if not chosen:
            parser.error(f"--only {arguments.only}: no method on the list matches")
        with tempfile.TemporaryDirectory(prefix="comm-hooks-") as scratch:
            corpus = Path(scratch, "corpus")
            corpus.write_bytes(load_corpus(None).content)
            jobs = make_jobs(chosen, arguments.seeds, arguments.steps)
            failed = run_missing(jobs, records, corpus, arguments.jobs)
    runs = read_records(records)
    if not runs:
        parser.error(f"{records} has no records: leave --jobs 0 out to make them")
    prototypes = (records / "prototypes.md").read_text()
    (arguments.results / "tried.md").write_text(make_page(runs, methods, prototypes))
    sys.exit(1 if failed else 0)


if __name__ == "__main__":
    main()
