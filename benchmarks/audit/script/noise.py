"""The noise of a script's releases: as large as the ledger has it, and never the same twice?"""

import math
import operator
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from scipy.stats import chi2

from benchmarks.audit.attacks.bounds import binomial_tail
from benchmarks.audit.checks.chances import normal_limit
from benchmarks.audit.script.run import Run

# Of a false alarm, for all tests of variances together, and for all of correlations.
_CHANCE = 1e-4
_SAMPLING_CHANCE = 1e-9
# Correlations of fewer elements are no normal numbers yet.
_FEWEST_ELEMENTS = 24


@dataclass(frozen=True)
class Noise:
    """The noise of one run, seen at one place.

    Attributes:
        values: (steps, elements), over the standard deviation that is claimed.
        names: the parameters and how many elements each has; empty where that is not known.
        steps: the number of each release.
        where: the line of each release.
        discrete: whether it is up to 0.1 % larger than is claimed, and sits on a grid.
    """

    values: torch.Tensor
    names: list[tuple[str, int]]
    steps: list[int]
    where: list[str]
    discrete: bool


def find_noise(run: Run) -> list[Noise]:
    """Return the noise of a run: of what was released, where nothing is compressed.

    Where something is, what was released is no Gaussian: then of what was added on each rank.
    """
    releases = [rank["releases"] for rank in run.ranks]
    first = releases[0]
    if first and all(release["dense"] for release in first):
        rows = []
        for step, release in enumerate(first):
            clean = sum((of_rank[step]["sums"].double() for of_rank in releases), torch.zeros(1))
            _, bound, batch = release["settings"]
            ranks = release["ranks"] if release["place"] == "local" else 1
            claimed = _claimed(release) * bound * math.sqrt(ranks)
            rows.append((release["released"].double() * batch - clean) / claimed)
        return _noises(rows, first)
    found = []
    alone = first and first[0]["place"] in ("aggregate", "clients")
    for of_rank in releases[:1] if alone else releases:
        rows = []
        for release in of_rank:
            added = [vector.double() / (_claimed(release) * s) for s, vector in release["noise"]]
            rows.append(torch.cat(added) if added else torch.zeros(0, dtype=torch.float64))
        found += _noises(rows, of_rank)
    return found


def _claimed(release: dict[str, Any]) -> float:
    """Return the noise multiplier that the ledger has for a release; its own, if it has none."""
    entry = release["entry"]
    multiplier: float = entry[0] if entry else release["settings"][0]
    return multiplier


def _noises(rows: list[torch.Tensor], releases: list[dict[str, Any]]) -> list[Noise]:
    """Put steps of as many elements together: those of one training."""
    found = []
    for length in sorted({len(row) for row in rows}):
        steps = [i for i, row in enumerate(rows) if len(row) == length]
        kinds = [releases[i] for i in steps]
        names = kinds[0]["names"]
        found.append(
            Noise(
                torch.stack([rows[i] for i in steps]),
                names if sum(count for _, count in names) == length else [],
                steps,
                [release["where"] for release in kinds],
                any(release["discrete"] for release in kinds),
            )
        )
    return found


def judge_size(noises: Sequence[Noise]) -> tuple[list[str], list[str], float]:
    """Compare variances with those that are claimed: of all, each step, parameter and element.

    Returns:
        What is too small and what is too large, in words, and the standard deviation over the one
        that is claimed.
    """
    small: list[str] = []
    large: list[str] = []
    squares = sum(float(noise.values.square().sum()) for noise in noises)
    count = sum(noise.values.numel() for noise in noises)
    for noise in noises:
        steps, elements = noise.values.shape
        if not elements:
            small.append(f"{noise.where[0]}: step {noise.steps[0] + 1} was released without noise")
            continue
        of_steps, of_elements = (noise.values.square().sum(axis) for axis in (1, 0))
        groups = [("the noise", float(of_steps.sum()), steps * elements)]
        for number, where, energy in zip(noise.steps, noise.where, of_steps, strict=True):
            groups.append((f"{where}: in step {number + 1} the noise", float(energy), elements))
        start = 0
        for name, size in noise.names:
            energy = of_elements[start : start + size].sum()
            groups.append((f"the noise of {name}", float(energy), steps * size))
            start += size
        tests = (len(groups) + elements) * len(noises)
        found = [(name, x / k) for name, x, k in groups if chi2.cdf(x, k) < _CHANCE / tests]
        if found:
            # Of a part, if it is there that noise is missing.
            lowest = min(found, key=operator.itemgetter(1))
            what, ratio = lowest if lowest[1] < 0.8 * found[0][1] else found[0]
            small.append(
                f"{what} has {math.sqrt(ratio):.3g} times the standard deviation that the ledger "
                "has"
            )
        elif steps >= 4:
            bare = int((chi2.cdf(of_elements.numpy(), steps) < _CHANCE / tests).sum())
            if bare:
                small.append(f"{bare} of {elements} elements have next to no noise")
        _, total, size = groups[0]
        if not noise.discrete and chi2.sf(total, size) < _CHANCE / len(noises):
            large.append(
                f"the noise has {math.sqrt(total / size):.3g} times the standard deviation that "
                "the ledger has: more is added than is accounted for"
            )
    return small, large, math.sqrt(squares / count) if count else 0.0


def judge_correlation(
    noises: Sequence[Noise], others: Sequence[Noise]
) -> tuple[list[str], float | None]:
    """Correlate the noise of every two steps of a run, and with a run of other secrets.

    Returns:
        What is correlated by more than chance, in words, and the largest correlation there is;
        None where there are too few numbers to tell.
    """
    problems: list[str] = []
    largest: float | None = None
    pairs = [(noise, noise) for noise in noises] + list(zip(noises, others, strict=False))
    for first, second in pairs:
        elements = first.values.shape[1]
        if second.values.shape[1] != elements or elements < _FEWEST_ELEMENTS:
            continue
        found = _normed(first.values) @ _normed(second.values).T
        if first is second:
            found = found.triu(1)
        allowed = _CHANCE / (max(1, found.numel()) * len(pairs))
        i, j = divmod(int(found.abs().argmax()), found.shape[1])
        value = float(found[i, j])
        largest = max(largest or 0.0, abs(value))
        if abs(value) <= math.tanh(normal_limit(allowed) / math.sqrt(elements - 3)):
            continue
        if first is second:
            problems.append(
                f"{second.where[j]}: the noise of steps {first.steps[i] + 1} and "
                f"{second.steps[j] + 1} is correlated by {value:.2f}: their difference shows the "
                "data"
            )
        else:
            problems.append(
                f"{first.where[i]}: the noise is the same in a process with another secret "
                f"(correlated by {value:.2f}): it follows from a seed, and who knows that can "
                "remove it"
            )
        break
    return problems, largest


def judge_draws(run: Run, other: Run) -> tuple[list[str], float | None]:
    """Compare who was drawn with the sample rate, and with a run of other secrets.

    Returns:
        What is wrong, in words, and the rate; None where it is not known.
    """
    units = run.ranks[0]["units"]
    if len(units) != 1:
        return [], None
    count, rate = units[0]
    drawn, others = drawn_of(run), drawn_of(other)
    trials = count * len(drawn)
    if not trials:
        return [], None
    total = sum(map(len, drawn))
    problems = []
    if binomial_tail(total, trials, rate) < _SAMPLING_CHANCE:
        problems.append(
            f"samples are drawn with probability {total / trials:.3g}, and the ledger has {rate:g}"
        )
    both = list(zip(drawn, others, strict=False))
    shared = sum(len(set(a) & set(b)) for a, b in both)
    chance = max(rate, total / trials) ** 2
    if chance < 1 and binomial_tail(shared, count * len(both), chance) < _SAMPLING_CHANCE:
        problems.append(
            f"{shared} of {total} samples are drawn in the same steps in a process with another "
            "secret: who is drawn follows from a seed, and sampling protects nobody"
        )
    return problems, total / trials


def drawn_of(run: Run) -> list[list[int]]:
    """Return who was drawn for each release, on all ranks together."""
    releases = [rank["releases"] for rank in run.ranks]
    return [
        sorted(i for release in of_ranks for i in release["drawn"] or ())
        for of_ranks in zip(*releases, strict=False)
    ]


def _normed(rows: torch.Tensor) -> torch.Tensor:
    centered = rows - rows.mean(1, keepdim=True)
    return centered / torch.linalg.vector_norm(centered, dim=1, keepdim=True).clamp(min=1e-30)
