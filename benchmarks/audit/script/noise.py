"""The noise and the draws of a script's releases, compared with the ledger."""

import math
from collections.abc import Sequence
from typing import Any

import torch
from scipy.stats import binom, chi2

from benchmarks.audit.checks.noise import Noise, repeated, too_quiet
from benchmarks.audit.script.run import Run

# Of a false alarm: of all variances together, and of all correlations.
_CHANCE = 1e-4
_SAMPLING_CHANCE = 1e-9
# Of the fourth moment, in standard deviations, and the fewest numbers that it is taken of.
_MOST_DEVIATIONS, _FEWEST = 6.0, 1000


def find_noise(run: Run) -> list[Noise]:
    """Return the noise of a run: of its releases if they are not compressed.

    A compressed release is not Gaussian; then return the noise that each rank added.
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
    """Return the noise multiplier of a release in the ledger, else that of the mechanism."""
    entry = release["entry"]
    multiplier: float = entry[0] if entry else release["settings"][0]
    return multiplier


def _noises(rows: list[torch.Tensor], releases: list[dict[str, Any]]) -> list[Noise]:
    """Group the steps by their numbers of elements: each training has its own."""
    found = []
    for length in sorted({len(row) for row in rows}):
        steps = [i for i, row in enumerate(rows) if len(row) == length]
        parts, end = [], 0
        for name, size in releases[steps[0]]["names"]:
            parts.append((name, end, end + size))
            end += size
        labels = [f"step {i + 1} at {releases[i]['where']}" for i in steps]
        values = torch.stack([rows[i] for i in steps])
        found.append(Noise(values, labels, steps, parts if end == length else []))
    return found


def judge_noise(noises: Sequence[Noise], others: Sequence[Noise]) -> tuple[list[str], float]:
    """Compare the size of the noise with the claim, and steps with each other.

    Args:
        noises: of a run.
        others: of a run with other secrets.

    Returns:
        The faults, and the standard deviation over the claimed one.
    """
    problems: list[str] = []
    for noise in noises:
        if not noise.values.numel():
            problems.append(f"{noise.labels[0]} was released without noise")
            continue
        problems += too_quiet(noise, "that the ledger has", _CHANCE / len(noises))
        squares, count = noise.values.square(), noise.values.numel()
        moment = float(squares.square().mean() / squares.mean() ** 2)
        if count >= _FEWEST and abs(moment - 3) > _MOST_DEVIATIONS * math.sqrt(24 / count):
            problems.append(
                f"the noise of {noise.labels[0]} and later steps is not normal: its fourth moment "
                f"is {moment:.2f} times the square of its variance, and not 3"
            )
    pairs: list[tuple[Noise, Noise | None]] = [(noise, None) for noise in noises]
    for noise, other in zip(noises, others, strict=False):
        if other.values.shape[1] == noise.values.shape[1]:
            labels = [f"{label} of a run with other secrets" for label in other.labels]
            pairs.append((noise, Noise(other.values, labels, other.steps, other.parts)))
    for noise, other_noise in pairs:
        problems += repeated(noise, _CHANCE / len(pairs), other_noise)
    sum_of_squares = sum(float(noise.values.square().sum()) for noise in noises)
    numbers = sum(noise.values.numel() for noise in noises)
    return problems, math.sqrt(sum_of_squares / numbers) if numbers else 0.0


def judge_draws(run: Run, other: Run) -> tuple[list[str], float | None]:
    """Compare the draws with the sample rate, and with a run of other secrets.

    Returns:
        The faults and the rate; None where it is not known.
    """
    units = run.ranks[0]["units"]
    if len(units) != 1:
        return [], None
    count, rate = units[0]
    drawn, others = drawn_of(run), drawn_of(other)
    trials = count * len(drawn)
    if not trials:
        return [], None
    entries = [release["entry"] for release in run.ranks[0]["releases"]]
    rate = min([rate, *(entry[1] for entry in entries if entry)])
    total = sum(map(len, drawn))
    problems = []
    if any(len(set(step)) < len(step) for step in drawn):
        problems.append("a sample is drawn twice in a step")
    expected, variance = count * rate, count * rate * (1 - rate)
    spread = sum((len(step) - expected) ** 2 for step in drawn)
    if variance > 1 and chi2.cdf(spread / variance, len(drawn)) < _SAMPLING_CHANCE:
        problems.append(
            f"batches have {min(map(len, drawn))} to {max(map(len, drawn))} samples, and those of "
            "independent draws would vary more"
        )
    if binom.sf(total - 1, trials, rate) < _SAMPLING_CHANCE:
        problems.append(
            f"samples are drawn with probability {total / trials:.3g}, and the ledger has {rate:g}"
        )
    both = list(zip(drawn, others, strict=False))
    shared = sum(len(set(a) & set(b)) for a, b in both)
    chance = max(rate, total / trials) ** 2
    if chance < 1 and binom.sf(shared - 1, count * len(both), chance) < _SAMPLING_CHANCE:
        problems.append(
            f"{shared} of {total} samples are drawn in the same steps in a run with other secrets: "
            "the draws follow from a seed, and sampling protects no sample"
        )
    return problems, total / trials


def drawn_of(run: Run) -> list[list[int]]:
    """Return the samples of each release, of all ranks together."""
    releases = [rank["releases"] for rank in run.ranks]
    return [
        sorted(i for release in of_ranks for i in release["drawn"] or ())
        for of_ranks in zip(*releases, strict=False)
    ]
