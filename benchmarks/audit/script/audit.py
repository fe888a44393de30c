"""The audit of a script: several runs, with and without one sample."""

import itertools
import os
import tempfile
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

from benchmarks.audit.script.draws import Kind, Plant
from benchmarks.audit.script.noise import drawn_of, find_noise, judge_draws, judge_noise
from benchmarks.audit.script.observer import Variant
from benchmarks.audit.script.run import Job, Run, ScriptFailed, run_script
from benchmarks.audit.script.sources import VARIED_ROWS
from benchmarks.audit.script.twins import Twins, compare, first_difference

_KINDS: tuple[Kind, ...] = ("absent", "huge", "swapped", "not finite")
_MOST_SOURCES = 4


@dataclass(frozen=True)
class Check:
    """One line of the table.

    Attributes:
        name: of the check.
        extent: the amount of data.
        found: the resulting number.
        outcome: ``"ok"``, ``"violation"``, ``"suspicious"`` or ``"not compared"``.
    """

    name: str
    extent: str
    found: str
    outcome: str


@dataclass(frozen=True)
class ScriptAudit:
    """The result of the audit of a script.

    Attributes:
        checks: the table.
        problems: one line for each violation of the guarantee.
        doubts: one line for each possible problem.
        notes: one line for each missing comparison, with the reason.
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
        """Whether a person should have a look."""
        return bool(self.doubts)

    def add(
        self,
        name: str,
        extent: str,
        found: str = "",
        problems: Sequence[str] = (),
        doubts: Sequence[str] = (),
    ) -> None:
        """Add a line, with its problems and doubts."""
        outcome = "violation" if problems else "suspicious" if doubts else "ok"
        self.checks.append(Check(name, extent, found, outcome))
        self.problems.extend(p for p in problems if p not in self.problems)
        self.doubts.extend(d for d in doubts if d not in self.doubts)


def audit_script(job: Job) -> ScriptAudit:
    """Run a script of private training several times, and compare its releases and its model.

    1. unchanged, twice: a difference between two equal runs cannot be compared;
    2. with the same draws and other noise: is the noise as large as the ledger has it, fresh in
       every step, and independent of seeds?  With other draws: do the draws follow from a seed?
    3. with one sample unchanged, absent, huge, with other labels and not finite, everything else
       and all noise being the same.  Each run continues with the releases of the first one, so
       that only clipped sums may depend on the sample, only in steps with the sample in the batch,
       and by at most C;
    4. with changed rows in one source of the data set: do other samples depend on them?

    A violation is certain (3, 4), or chance brings it about in one audit of 2,000.

    Args:
        job: the script and its settings.

    Raises:
        ScriptFailed: if it does not finish a run, does not exist, or trains nothing privately.

    Example::

        >>> from pathlib import Path
        >>> from benchmarks.audit import Job, audit_script
        >>> audit_script(Job(Path("no such script.py")))
        Traceback (most recent call last):
        benchmarks.audit.script.run.ScriptFailed: no such script.py: there is no ...
    """
    if not job.script.is_file():
        raise ScriptFailed(f"{job.script}: there is no such file")
    prefix = "comm-hooks-audit-"
    with tempfile.TemporaryDirectory(prefix=prefix, ignore_cleanup_errors=True) as folder:
        return _audit(job, _Runner(job, Path(folder)))


class _Runner:
    """Runs variants, as many at a time as there are cores; all follow the first one."""

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

    def whole(self, *variants: Variant) -> list[Run]:
        """Return the runs, or raise the first failure."""
        return [_whole(run) for run in self(*variants)]

    def _run(self, variant: Variant, folder: Path) -> Run | ScriptFailed:
        folder.mkdir()
        try:
            return run_script(self._job, variant, folder, self._first)
        except ScriptFailed as failed:
            return failed


def _whole(run: Run | ScriptFailed) -> Run:
    if isinstance(run, ScriptFailed):
        raise run
    return run


def _audit(job: Job, runner: _Runner) -> ScriptAudit:
    audit = ScriptAudit()
    (reference,) = runner.whole(Variant("as it is"))
    record = reference.ranks[0]
    if not record["engines"]:
        raise ScriptFailed(
            f"{job.script} never calls make_private() or private_participation(): there is no "
            "private training to audit"
        )
    if not record["releases"] and not record["steps"]:
        raise ScriptFailed(f"{job.script} takes no private step: there is nothing to audit")
    again, other_noise, other_draws = runner.whole(
        Variant("as it is, again"),
        Variant("other noise", noise=1),
        Variant("other draws", noise=2, draws=2),
    )
    _check_ledger(audit, reference)
    if names := record["replaced"]:
        audit.doubts.append(
            f"the script replaces {', '.join(names)}: what is promised, and observed here, is what "
            "the library's own functions do"
        )
    # Clients are drawn by the secret of their noise.
    is_of_clients = any(release["place"] == "clients" for release in record["releases"])
    noises = find_noise(reference)
    others = find_noise(other_draws if is_of_clients else other_noise)
    problems, ratio = judge_noise(noises, others)
    numbers = sum(noise.values.numel() for noise in noises)
    audit.add("noise", f"{numbers} numbers", f"{ratio:.4f} of the claim", problems)
    problems, rate = judge_draws(reference, other_draws)
    if rate is not None:
        audit.add("draws", f"{len(drawn_of(reference))} steps", f"rate {rate:.3g}", problems)
    if difference := first_difference(reference, again):
        audit.notes.append(
            f"twins are not comparable: two runs with the same seeds and secrets differ "
            f"({difference}). Only noise, sampling and the ledger were checked"
        )
        audit.checks.append(Check("twins", "two equal runs", "differ", "not compared"))
        return audit
    _check_twins(audit, runner, reference, "client" if is_of_clients else "sample")
    _check_sources(audit, runner, reference)
    return audit


def _check_ledger(audit: ScriptAudit, reference: Run) -> None:
    """Compare releases with entries, in their order; the first rank has the ledger."""
    record = reference.ranks[0]
    releases, entries = record["releases"], record["entries"]
    problems = []
    for number, release in enumerate(releases, start=1):
        if release["entries"] < number:
            problems.append(
                f"{release['where']}: release {number} has no entry in the ledger, which has "
                f"{release['entries']}: its epsilon is too small"
            )
            break
    steps = [event for event in record["events"] if event["kind"] == "private"]
    if len(steps) > len(releases):
        problems.append(
            f"{steps[len(releases)]['where']}: step {len(releases) + 1} bypassed the mechanism, "
            f"which has released {len(releases)} sums: its noise is not known"
        )
    if record["in ledger"] < entries:
        problems.append(
            f"the ledger has {record['in ledger']} steps in the end, of {entries} that were entered"
        )
    audit.add("ledger", f"{len(releases)} releases", f"{entries} entries", problems)


def _check_twins(audit: ScriptAudit, runner: _Runner, reference: Run, unit: str) -> None:
    # Clients have no labels.
    kinds = [kind for kind in _KINDS if unit == "sample" or kind != "swapped"]
    early, late, never = choose(reference, len(reference.ranks))
    # Clients keep what they were, so that changes of several add up.
    indices = (late, early) if unit == "client" else (late, early, None)
    wanted = [Plant(index, kind) for index in dict.fromkeys(indices) for kind in kinds]
    if never is not None:
        wanted.append(Plant(never, "absent"))
    done = runner(*(Variant(f"{p.name(unit)} {p.kind}", plant=p) for p in wanted))
    runs: dict[Plant, Run] = {}
    for plant, run in zip(wanted, done, strict=True):
        if isinstance(run, ScriptFailed) and plant.kind != "absent":
            audit.doubts.append(f"{run}. A failure shows that {plant.name(unit)} takes part")
        else:
            runs[plant] = _whole(run)
    if not any(drawn_of(reference)):
        audit.notes.append(f"no {unit} was drawn in these steps: give more --steps")
    for plant, run in runs.items():
        absent = runs[Plant(plant.index, "absent")]
        present = reference if plant.kind == "absent" else run
        twins = [compare(absent, present, reference, unit)]
        # With equal numbers of rows, also where each row draws random numbers.
        blank = runs.get(Plant(plant.index, "not finite"))
        if blank is not None and blank is not present:
            twins.append(compare(blank, present, reference, unit))
        _add_twins(audit, twins[0].planted, twins)


def _add_twins(audit: ScriptAudit, name: str, twins: Sequence[Twins]) -> None:
    changes = [t.largest for t in twins if t.largest is not None]
    problems = [p for t in twins for p in t.problems]
    found = f"sums change by {max(changes):.4f} C" if changes else "nothing changes"
    if twins[0].drawn and not changes and not problems:
        found = "all but clipped sums"
        if len(twins) > 1 or not name.endswith("not finite"):
            audit.notes.append(
                f"{name}: its effect on clipped sums was not compared: a batch of another length "
                "draws other random numbers, and samples cannot be made NaN"
            )
    audit.add(name, f"drawn in {twins[0].drawn} steps", found, problems)


def choose(reference: Run, ranks: int) -> tuple[int, int, int | None]:
    """Return an index of the first batch, a later one on another rank, and one of no batch.

    The last is None if every sample was drawn.
    """
    drawn = drawn_of(reference)
    units = reference.ranks[0]["units"]
    first = {i: step for step, indices in reversed([*enumerate(drawn)]) for i in indices}
    times = Counter(itertools.chain(*drawn))
    if not first:
        return 0, 0, None

    def preference(index: int) -> tuple[int, int]:
        # Rare draws, so that a return in other steps shows, and after three quarters of them.
        return times[index], abs(first[index] - 3 * len(drawn) // 4)

    early = min((i for i in first if first[i] == min(first.values())), key=preference)
    later = [i for i in first if 0 < first[i] < max(2, len(drawn) - 1)] or list(first)
    late = min([i for i in later if i % ranks != early % ranks] or later, key=preference)
    never = next((i for i in range(units[0][0] if units else 1) if i not in first), None)
    return early, late, never


def _check_sources(audit: ScriptAudit, runner: _Runner, reference: Run) -> None:
    """Change rows of each source of the data set, and look for other changes."""
    sources = reference.ranks[0]["sources"]
    rows, others = sources["rows"], sources["others"]
    if not rows:
        return
    places = [
        (number, *made)
        for number, made in enumerate(sources["made"])
        # Some samples may be in the data set several times.
        if made[2][0] >= max(VARIED_ROWS, len(rows) // 4)
    ][:_MOST_SOURCES]
    if not places:
        audit.notes.append(
            "computations before the data set were not checked: it comes from none of torch.load, "
            "numpy.load, torch.from_numpy, torch.tensor, torch.randn"
        )
    runs = runner.whole(*(Variant(f"rows of source {p[0]}", varied_source=p[0]) for p in places))
    for (_, where, name, shape, is_loaded), run in zip(places, runs, strict=True):
        found = run.ranks[0]["sources"]
        # In any order.
        before, after = Counter(rows), Counter(found["rows"] or rows)
        changed = max((before - after).total(), (after - before).total())
        what = f"{where}: {VARIED_ROWS} rows of the result of {name}() change"
        wrong: list[str] = []
        odd: list[str] = []
        if changed > VARIED_ROWS:
            # Few changes may come from a table that many samples refer to.
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
