"""The audit of a script as it is: run several times, with and without one sample."""

import itertools
import os
import tempfile
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

from benchmarks.audit.script.noise import (
    drawn_of,
    find_noise,
    judge_correlation,
    judge_draws,
    judge_size,
)
from benchmarks.audit.script.observer import Variant
from benchmarks.audit.script.planting import Kind, Plant
from benchmarks.audit.script.run import Job, Run, ScriptFailed, run_script
from benchmarks.audit.script.sources import VARIED_ROWS
from benchmarks.audit.script.twins import Twins, are_alike, compare

_KINDS: tuple[Kind, ...] = ("absent", "huge", "swapped", "not finite")
_MOST_SOURCES = 3


@dataclass(frozen=True)
class Check:
    """One line of the table.

    Attributes:
        name: what was looked at.
        extent: how much of it.
        found: the number that came out.
        outcome: ``"ok"``, ``"violation"``, ``"suspicious"`` or ``"not compared"``.
    """

    name: str
    extent: str
    found: str
    outcome: str


@dataclass(frozen=True)
class ScriptAudit:
    """What came out.

    Attributes:
        checks: all that was looked at.
        problems: what a sample shows by, and what is not as the ledger has it, in words.
        doubts: what may be a problem, in words.
        notes: what was not compared, and why.
    """

    checks: list[Check] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)
    doubts: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    @property
    def violated(self) -> bool:
        """Whether the guarantee does not hold."""
        return bool(self.problems)

    @property
    def suspicious(self) -> bool:
        """Whether somebody should have a look."""
        return bool(self.doubts)

    def add(
        self,
        name: str,
        extent: str,
        found: str = "",
        problems: Sequence[str] = (),
        doubts: Sequence[str] = (),
        *,
        compared: bool = True,
    ) -> None:
        """Add a line, with what is wrong."""
        fine = "ok" if compared else "not compared"
        outcome = "violation" if problems else "suspicious" if doubts else fine
        self.checks.append(Check(name, extent, found, outcome))
        self.problems.extend(p for p in problems if p not in self.problems)
        self.doubts.extend(d for d in doubts if d not in self.doubts)


def audit_script(job: Job) -> ScriptAudit:
    """Run a script of private training several times, and compare what it releases and keeps.

    1. as it is, twice: what differs between two equal runs cannot be compared
    2. with the same draws and other noise: is the noise as large as the ledger has it, anew in
       every step, and not from a seed?  With other draws: does the sampling follow from a seed?
    3. with one sample as it is, absent, huge, with other labels and not finite, everything else
       and all noise being the same.  Each run goes on with what the first one has released, so
       that nothing but clipped sums may depend on the sample, those only in steps in which it was
       drawn, and by at most C
    4. with one row changed of what the data set is made of: do other samples depend on it?

    A violation is declared only by what is certain (3, 4), or where chance would bring it about in
    one audit of 2,000.

    Args:
        job: the script, and how it is run.

    Raises:
        ScriptFailed: if it does not get through a run, is not there, or trains nothing privately.

    Example::

        >>> from pathlib import Path
        >>> from benchmarks.audit import Job, audit_script
        >>> audit_script(Job(Path("no such script.py")))
        Traceback (most recent call last):
        benchmarks.audit.script.run.ScriptFailed: no such script.py: there is no ...
    """
    if not job.script.is_file():
        raise ScriptFailed(f"{job.script}: there is no such file")
    with tempfile.TemporaryDirectory(
        prefix="comm-hooks-audit-", ignore_cleanup_errors=True
    ) as folder:
        return _audit(job, _Runner(job, Path(folder)))


class _Runner:
    """Runs variants, as many at a time as there are cores; all go on as the first one has."""

    def __init__(self, job: Job, folder: Path) -> None:
        self._job = job
        self._folders = (folder / str(number) for number in itertools.count())
        self._first: Path | None = None
        self._at_once = max(1, len(os.sched_getaffinity(0)) // (job.processes or 1))

    def __call__(self, *variants: Variant) -> list[Run | ScriptFailed]:
        folders = list(itertools.islice(self._folders, len(variants)))
        with ThreadPoolExecutor(self._at_once) as threads:
            done = list(threads.map(self._run, variants, folders))
        self._first = self._first or folders[0]
        return done

    def _run(self, variant: Variant, folder: Path) -> Run | ScriptFailed:
        folder.mkdir()
        try:
            return run_script(self._job, variant, folder, self._first)
        except ScriptFailed as failed:
            return failed


def _audit(job: Job, runner: _Runner) -> ScriptAudit:
    audit = ScriptAudit()
    (reference,) = map(_whole, runner(Variant("as it is")))
    record = reference.ranks[0]
    if not record["engines"]:
        raise ScriptFailed(
            f"{job.script} never calls make_private() or private_participation(): there is no "
            "private training to audit"
        )
    if not record["releases"] and not record["steps"]:
        raise ScriptFailed(f"{job.script} takes no private step: there is nothing to audit")
    again, other_noise, other_draws = map(
        _whole,
        runner(
            Variant("as it is, again"),
            Variant("other noise", noise=1),
            Variant("other draws", noise=2, draws=2),
        ),
    )
    _check_ledger(audit, reference)
    # Clients are drawn by the secret that their noise comes from.
    is_of_clients = any(release["place"] == "clients" for release in record["releases"])
    _check_noise(audit, reference, other_draws if is_of_clients else other_noise)
    problems, rate = judge_draws(reference, other_draws)
    if rate is not None:
        steps = len(drawn_of(reference))
        audit.add("who is drawn", f"{steps} steps", f"rate {rate:.3g}", problems)
    if difference := are_alike(reference, again):
        audit.notes.append(
            f"twins are not comparable: two runs with the same seeds and secrets differ "
            f"({difference}). Only noise, sampling and the ledger were looked at"
        )
        audit.add("twins", "two equal runs", "differ", compared=False)
        return audit
    _check_twins(audit, runner, reference, "client" if is_of_clients else "sample")
    _check_sources(audit, runner, reference)
    return audit


def _whole(run: Run | ScriptFailed) -> Run:
    if isinstance(run, ScriptFailed):
        raise run
    return run


def _check_ledger(audit: ScriptAudit, reference: Run) -> None:
    """Compare releases with entries, in their order; the first rank has the ledger."""
    record = reference.ranks[0]
    releases, entries = record["releases"], record["entries"]
    problems = []
    for number, release in enumerate(releases, start=1):
        if release["entries"] < number:
            problems.append(
                f"{release['where']}: release {number} has no entry in the ledger, which has "
                f"{release['entries']}: epsilon is larger than it says"
            )
            break
    steps = [event for event in record["events"] if event["kind"] == "private"]
    for number, step in enumerate(steps, start=1):
        if len(releases) < number:
            problems.append(
                f"{step['where']}: step {number} went past the mechanism, which has released "
                f"{len(releases)} sums: its noise is not known"
            )
            break
    if record["in ledger"] < entries:
        problems.append(
            f"the ledger has {record['in ledger']} steps in the end, of {entries} that were entered"
        )
    audit.add("ledger", f"{len(releases)} releases", f"{entries} entries", problems)


def _check_noise(audit: ScriptAudit, reference: Run, other: Run) -> None:
    noises, others = find_noise(reference), find_noise(other)
    count = sum(noise.values.numel() for noise in noises)
    small, large, ratio = judge_size(noises)
    audit.add("size of the noise", f"{count} numbers", f"{ratio:.4f} of the claim", small, large)
    problems, largest = judge_correlation(noises, others)
    found = "too few numbers" if largest is None else f"correlated by {largest:.3f} at most"
    steps = sum(len(noise.values) for noise in noises)
    audit.add(
        "noise of two steps or runs",
        f"pairs of {steps} steps",
        found,
        problems,
        compared=largest is not None,
    )


def _check_twins(audit: ScriptAudit, runner: _Runner, reference: Run, unit: str) -> None:
    # Clients have no labels.
    kinds = [kind for kind in _KINDS if unit == "sample" or kind != "swapped"]
    early, late, never = choose(reference, len(reference.ranks))
    wanted = [Plant(index, kind) for index in dict.fromkeys((late, early)) for kind in kinds]
    if never is not None:
        wanted.append(Plant(never, "absent"))
    done = runner(*(Variant(f"{unit} {p.index} {p.kind}", plant=p) for p in wanted))
    runs: dict[Plant, Run] = {}
    for plant, run in zip(wanted, done, strict=True):
        if isinstance(run, ScriptFailed):
            if plant.kind == "absent":
                raise run
            audit.doubts.append(
                f"{run}. Whoever sees that it has stopped knows of {unit} {plant.index}"
            )
        else:
            runs[plant] = run
    if not any(drawn_of(reference)):
        audit.notes.append("nobody was drawn in these steps: give more --steps")
    for plant, run in runs.items():
        absent = runs[Plant(plant.index, "absent")]
        present = reference if plant.kind == "absent" else run
        twins = [compare(absent, present, reference, unit)]
        # With as many rows in each batch, also where more rows draw more random numbers.
        blank = runs.get(Plant(plant.index, "not finite"))
        if blank is not None and blank is not present:
            twins.append(compare(blank, present, reference, unit))
        _add_twins(audit, f"{unit} {twins[0].planted}", twins)


def _add_twins(audit: ScriptAudit, name: str, twins: Sequence[Twins]) -> None:
    changes = [t.largest for t in twins if t.largest is not None]
    problems = [p for t in twins for p in t.problems]
    found = f"sums change by {max(changes):.4f} C" if changes else "nothing changes"
    if twins[0].drawn and not changes and not problems:
        found = "all but clipped sums"
        if len(twins) > 1 or not name.endswith("not finite"):
            audit.notes.append(
                f"{name}: what it does to clipped sums was not compared: a batch of another length "
                "draws other random numbers, and samples cannot be made NaN"
            )
    audit.add(name, f"drawn in {twins[0].drawn} steps", found, problems)


def choose(reference: Run, ranks: int) -> tuple[int, int, int | None]:
    """Return an index that is drawn in the first step, one on another rank that is drawn later, and
    one that never is, if there are such.
    """
    drawn = drawn_of(reference)
    units = reference.ranks[0]["units"]
    count = units[0][0] if units else 1
    first = {i: step for step, indices in reversed([*enumerate(drawn)]) for i in indices}
    times = Counter(itertools.chain(*drawn))
    if not first:
        return 0, 0, None

    def liking(index: int) -> tuple[int, int]:
        # Drawn rarely, so that what comes back in other steps shows, and in the middle.
        return times[index], abs(first[index] - len(drawn) // 2)

    early = min((i for i in first if first[i] == min(first.values())), key=liking)
    later = [i for i in first if 0 < first[i] < max(2, len(drawn) - 1)] or list(first)
    elsewhere = [i for i in later if i % ranks != early % ranks] or later
    late = min(elsewhere, key=liking)
    never = next((i for i in range(count) if i not in first), None)
    return early, late, never


def _check_sources(audit: ScriptAudit, runner: _Runner, reference: Run) -> None:
    """Change rows of each thing that the data set may be made of, and see what else changes."""
    sources = reference.ranks[0]["sources"]
    rows, others = sources["rows"], sources["others"]
    if not rows:
        return
    places = [
        (number, *made)
        for number, made in enumerate(sources["made"])
        # Some samples may stand in the data set several times.
        if made[2][0] >= max(VARIED_ROWS, len(rows) // 4)
    ][:_MOST_SOURCES]
    if not places:
        audit.notes.append(
            "what was computed of the data before the data set was made was not seen (it comes "
            "from none of torch.load, numpy.load, torch.from_numpy, torch.tensor, torch.randn)"
        )
    done = runner(*(Variant(f"rows of source {p[0]}", varied_source=p[0]) for p in places))
    for (_, where, name, shape, is_loaded), run in zip(places, done, strict=True):
        found = _whole(run).ranks[0]["sources"]
        # In whatever order they are by then.
        before, after = Counter(rows), Counter(found["rows"] or rows)
        changed = max((before - after).total(), (after - before).total())
        what = f"{where}: {VARIED_ROWS} rows of what {name}() has returned there change"
        wrong: list[str] = []
        odd: list[str] = []
        if changed > VARIED_ROWS:
            # Or what looks like data is a table that many samples refer to.
            (wrong if changed > len(rows) // 2 else odd).append(
                f"{what} {changed} of {len(rows)} samples: they depend on each other before "
                "training begins"
            )
        names = [key for key, value in others.items() if found["others"].get(key, value) != value]
        if names and changed:
            more = f" (and {len(names) - 1} more)" if len(names) > 1 else ""
            wrong.append(f"{what} {names[0]}{more}, too: it depends on the data without privacy")
        audit.add(
            f"{VARIED_ROWS} rows of {name} at {where}",
            f"{'x'.join(map(str, shape))} numbers",
            f"{changed} samples change",
            wrong if is_loaded else [],
            odd if is_loaded else [*wrong, *odd],
        )
