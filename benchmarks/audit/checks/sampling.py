"""Is each sample drawn independently, at the claimed rate, in every step, rank and process?"""

import itertools
import math
from collections.abc import Iterator

import numpy as np
import numpy.typing as npt

from benchmarks.audit.checks.chances import (
    SHARES,
    Array,
    chance,
    log_tail,
    normal_limit,
    strongest_lag,
)
from benchmarks.audit.configuration import Stages
from benchmarks.audit.world import user_seed

Masks = npt.NDArray[np.bool_]

_PROCESSES = 2
_MOST_WORK = 12_000_000
_MOST_ROWS = 1600
_STARTS = 900
_BLOCKS = (1, 10, 100, 1000)
_MOST_SAMPLES = 6000


class _Malformed(Exception):
    """A batch with a repeated sample, or a missing batch."""


def check_sampling(stages: Stages) -> list[str]:
    """Return the faults of the batches, one line each."""
    rate, ranks = stages.configuration.sample_rate, stages.configuration.world_size
    samples = min(max(600, round(30 / rate)), _MOST_SAMPLES)
    rows = min(_MOST_ROWS, _MOST_WORK // samples)
    steps = max(20, rows // (_PROCESSES * ranks) // 2 * 2)
    try:
        masks = _collect(stages, ranks, samples, steps, _PROCESSES)
        problems = examine(masks, rate)
        if not problems:
            few = _collect(stages, 1, max(1, round(0.7 / rate)), 300, 1)
            problems = _sizes(few, rate, exact=True)
    except _Malformed as malformed:
        return [str(malformed)]
    enough = min(20_000, math.ceil(25 / (rate * (1 - rate)))) if rate < 1 else 1
    # Only if two processes draw the same batch less often by chance than the budget allows.
    if _STARTS**2 / 2 * (rate**2 + (1 - rate) ** 2) ** enough < SHARES["sampling: seeds"]:
        firsts = [str(_draw(stages, start % ranks, enough, 1)[0]) for start in range(_STARTS)]
        same = len(firsts) - len(set(firsts))
        if same and not problems:
            problems.append(
                f"{same} of {len(firsts)} processes drew the batch of another one: all seeds of "
                "so few bits can be tried"
            )
    return problems


def _draw(stages: Stages, rank: int, samples: int, steps: int, epochs: int = 1) -> list[list[int]]:
    with user_seed():
        sampler = stages.sampler(rank, samples, steps)
        return [list(batch) for _ in range(epochs) for batch in sampler]


def _collect(stages: Stages, ranks: int, samples: int, steps: int, processes: int) -> Masks:
    """Return the batches of all ranks, (processes, ranks, steps, samples), in two epochs each."""
    masks = np.zeros((processes, ranks, steps, samples), dtype=np.bool_)
    for process, rank in itertools.product(range(processes), range(ranks)):
        batches = _draw(stages, rank, samples, steps // 2, epochs=2)
        if len(batches) != steps:
            raise _Malformed(
                f"rank {rank} draws {len(batches)} batches instead of {steps}: the accountant "
                "counts empty batches as steps, too"
            )
        for step, indices in enumerate(batches):
            if len(set(indices)) < len(indices):
                raise _Malformed(
                    f"rank {rank} draws a sample twice for step {step + 1}: it would count twice "
                    "in the sum, by 2 C"
                )
            masks[process, rank, step, indices] = True
    return masks


def examine(masks: Masks, rate: float) -> list[str]:
    """Return the faults of masks, (processes, ranks, steps, samples)."""
    problems = _rates(masks, rate)
    if 0 < masks.mean() < 1:
        for check in (_apart_in_time, _shifted):
            problems += check(masks)
        problems += _sizes(masks, rate, exact=False)
    return problems


def _groups(masks: Masks, rate: float) -> Iterator[tuple[str, int, int]]:
    """Yield the name, the draws and the trials of ranks, steps and blocks of samples."""
    processes, ranks, steps, samples = masks.shape
    for process, rank in itertools.product(range(processes), range(ranks)):
        part = masks[process, rank]
        yield f"rank {rank} in process {process + 1}", int(part.sum()), part.size
    by_step, of_step = masks.sum((0, 1, 3)), processes * ranks * samples
    for step in range(steps):
        yield f"step {step + 1}", int(by_step[step]), of_step
    for period in range(2, min(17, steps)):
        for rest in range(period):
            chosen = by_step[rest::period]
            what = f"every step n with n mod {period} = {(rest + 1) % period}"
            yield what, int(chosen.sum()), len(chosen) * of_step
    by_sample = masks.sum((0, 2))
    for rank, counts in [*enumerate(by_sample), (-1, by_sample.sum(0))]:
        trials = processes * steps * (ranks if rank < 0 else 1)
        where = f" of rank {rank}" if rank >= 0 else ""
        for size in (size for size in _BLOCKS if size < samples):
            starts = np.arange(0, samples, size)
            totals = np.add.reduceat(counts, starts)
            sizes = np.diff([*starts, samples])
            # The worst block stands for all of its size.
            worst = int(((totals / sizes - rate * trials) * np.sqrt(sizes)).argmax())
            what = f"sample {worst}" if size == 1 else f"samples from {worst * size} on"
            yield what + where, int(totals[worst]), int(sizes[worst]) * trials


def _rates(masks: Masks, rate: float) -> list[str]:
    """Report a group of draws with a higher rate than claimed."""
    groups = list(_groups(masks, rate))
    comparisons = len(groups) + (masks.shape[1] + 1) * masks.shape[3] * 2
    allowed = math.log(chance("sampling: rate", comparisons))
    for what, found, trials in groups:
        if found > rate * trials and float(log_tail(found, trials, rate)) < allowed:
            draws = "is drawn" if what.startswith("sample ") else "has samples drawn"
            return [
                f"{what} {draws} with probability {found / trials:.3g} instead of the claimed "
                f"sample_rate {rate:g}"
            ]
    return []


def _sizes(masks: Masks, rate: float, *, exact: bool) -> list[str]:
    """Report batches of one size, batches of samples drawn together, and missing empty batches."""
    samples = masks.shape[3]
    sizes = masks.sum(3).astype(np.float64).reshape(-1)
    # A lower rate than the claimed one is no fault.
    q = min(float(masks.mean()), rate)
    variance = samples * q * (1 - q)
    if variance == 0:
        return []
    squares = (sizes - samples * q) ** 2
    fourth = variance * (1 + 3 * (samples - 2) * q * (1 - q))
    of_squares = max(fourth - variance**2, 1e-12)
    deviations = float((squares - variance).sum()) / math.sqrt(len(sizes) * of_squares)
    # Sums of squares have longer tails than normal variables.
    if abs(deviations) > 1.5 * normal_limit(chance("sampling: sizes", 4)):
        return [
            f"batch sizes vary {_more(deviations)} than those of Poisson sampling (variance "
            f"{sizes.var():.3g} instead of {variance:.3g}): draw samples independently"
        ]
    empty, usual = int((sizes == 0).sum()), (1 - q) ** samples
    limit = math.log(chance("sampling: sizes", 4))
    if exact and 0 < usual < 1 and float(log_tail(empty, len(sizes), usual)) < limit:
        return [
            f"{empty} of {len(sizes)} batches are empty instead of {usual * len(sizes):.0f}: an "
            "empty batch is a step like all others"
        ]
    return []


def _apart_in_time(masks: Masks) -> list[str]:
    """Report two series of batches with more or fewer samples in common at one distance in time.

    Shuffling shows by fewer: it deals out all samples before one comes again.
    """
    processes, ranks, steps, samples = masks.shape
    rate = float(masks.mean())
    centred = _centred(masks.reshape(-1, samples))
    series = processes * ranks
    products = (centred @ centred.T).reshape(series, steps, series, steps)
    pairs = list(itertools.combinations_with_replacement(range(series), 2))
    limit = 1.15 * normal_limit(chance("sampling: lags", len(pairs) * 2 * steps))
    worst, what = 0.0, ""
    for (a, b), lag in itertools.product(pairs, range(-steps + 2, steps - 1)):
        diagonal = np.diagonal(products[a, :, b], lag)
        # A sum of rare events is not normal.
        if (a == b and lag <= 0) or len(diagonal) * samples * rate * rate < 50:
            continue
        deviations = float(diagonal.sum()) / math.sqrt(len(diagonal) * samples)
        if abs(deviations) > max(limit, abs(worst)):
            one, other = (f"rank {c % ranks} in process {c // ranks + 1}" for c in (a, b))
            worst, what = deviations, f"batches of {one} and those of {other}, {lag} steps later,"
    if not worst:
        return []
    return [
        f"{what} have {_more(worst)} samples in common than chance has it "
        f"({abs(worst):.0f} standard deviations): draw every batch independently"
    ]


def _shifted(masks: Masks) -> list[str]:
    """Report two ranks with the same draws at shifted places."""
    _, ranks, _, samples = masks.shape
    pairs = list(itertools.combinations(range(ranks), 2))
    centred = _centred(masks.swapaxes(0, 1).reshape(ranks, -1, samples))
    least = 50 / float(masks.mean()) ** 2
    for one, other in pairs:
        allowed = chance("sampling: shifts", len(pairs))
        if found := strongest_lag(centred[one], centred[other], least, allowed):
            shift, deviations = found
            return [
                f"sample i of rank {one} and sample i{shift:+d} of rank {other} are drawn together "
                f"{_more(deviations)} often than chance has it ({abs(deviations):.0f} standard "
                "deviations): draw on every rank independently"
            ]
    return []


def _centred(masks: Masks) -> Array:
    """Return masks with mean 0 and variance 1."""
    rate = float(masks.mean())
    centred: Array = (masks.astype(np.float64) - rate) / math.sqrt(rate * (1 - rate))
    return centred


def _more(deviations: float) -> str:
    return "more" if deviations > 0 else "less"
