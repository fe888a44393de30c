"""Runs that differ in nothing but their seed, and what they reached on average."""

import statistics
from collections.abc import Iterable
from dataclasses import asdict, dataclass, fields
from typing import Any

from benchmarks.lab.runs import BASELINE, CONTROL, Figures, Run, Settings

# What may differ between runs of one group: a curve with more points has the same end.
_FREE = ("seed", "eval_every")


@dataclass(frozen=True)
class Group:
    """One method under one set of conditions, with all its seeds.

    ``figures`` are the mean over the runs that finished.  ``gap`` is the loss minus that of the
    baseline with the same seed, averaged over the seeds that both finished; ``baselines`` and
    ``control`` are those of the same conditions.
    """

    name: str
    runs: list[Run]
    figures: Figures | None
    gap: float | None
    baselines: list[Run]
    control: Figures | None

    @property
    def method(self) -> str:
        """The method that all runs of the group have in common."""
        return self.runs[0].method


def group_runs(runs: list[Run]) -> list[Group]:
    """Put runs that differ in their seed only together, in the order of their first appearance.

    Where runs were made under several conditions (steps, model, text), a letter behind the method's
    name tells them apart, see :func:`conditions_of`; each is compared with the baseline and the
    control of its own conditions.
    """
    letters = conditions_of(runs)
    together: dict[tuple[str, str], list[Run]] = {}
    for run in runs:
        together.setdefault((run.method, _letter(run, letters)), []).append(run)
    groups = []
    for (method, letter), members in together.items():
        baseline = together.get((BASELINE, letter), [])
        gaps = _gaps(members, baseline)
        groups.append(
            Group(
                name=f"{method} ({letter})" if len(letters) > 1 else method,
                runs=members,
                figures=mean_figures(members),
                gap=statistics.fmean(gaps) if gaps else None,
                baselines=baseline,
                control=mean_figures(together.get((CONTROL, letter), [])),
            )
        )
    return groups


def conditions_of(runs: Iterable[Run]) -> dict[str, dict[str, Any]]:
    """Return the conditions under which the runs were made, by letter, without the seed."""
    found: list[dict[str, Any]] = []
    for run in runs:
        if (conditions := _conditions(run)) not in found:
            found.append(conditions)
    return {_nth_letter(i): conditions for i, conditions in enumerate(found)}


def seed_names(runs: list[Run]) -> list[str]:
    """Return what to call each run of a group: its seed, and its number where that is no name."""
    seeds = [run.settings.seed for run in runs]
    return [
        f"run {i + 1}" if seed is None or seeds.count(seed) > 1 else f"seed {seed}"
        for i, seed in enumerate(seeds)
    ]


def baseline_of(run: Run, baselines: list[Run]) -> Figures | None:
    """Return what the baseline with the same seed reached, if there is one."""
    same = (each for each in baselines if each.settings.seed == run.settings.seed)
    return next((each.figures for each in same if each.figures), None)


def mean_figures(runs: Iterable[Run]) -> Figures | None:
    """Return the mean of what the runs that finished have reached."""
    finished = [run.figures for run in runs if run.figures]
    if not finished:
        return None
    values: dict[str, Any] = {}
    for each in fields(Figures):
        given = [getattr(figures, each.name) for figures in finished]
        values[each.name] = None if None in given else statistics.fmean(given)
    return Figures(**values)


def _gaps(runs: list[Run], baselines: list[Run]) -> list[float]:
    pairs = ((run.figures, baseline_of(run, baselines)) for run in runs)
    return [own.loss - other.loss for own, other in pairs if own and other]


def _conditions(run: Run) -> dict[str, Any]:
    if not isinstance(run.settings, Settings):
        return {"log": True}
    settings = asdict(run.settings)
    model = settings.pop("model")
    settings.update({f"model.{name}": value for name, value in model.items()})
    settings.update({"text": run.facts.get("Text")})
    return {name: value for name, value in settings.items() if name not in _FREE}


def _letter(run: Run, letters: dict[str, dict[str, Any]]) -> str:
    conditions = _conditions(run)
    return next(letter for letter, each in letters.items() if each == conditions)


def _nth_letter(index: int) -> str:
    lap, letter = divmod(index, 26)
    return chr(ord("A") + letter) + (str(lap + 1) if lap else "")
