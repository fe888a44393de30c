"""Is every sample drawn with the claimed probability, independently of all else?

Batches of many ranks and processes, drawn under the same user seed, are compared with each other:
who is in which step, of which rank, of which process.
"""

import itertools
import math
from collections.abc import Callable

import numpy as np
import numpy.typing as npt

from benchmarks.audit.checks.chances import (
    SHARES,
    chance,
    log_tail,
    normal_limit,
    strongest_lag,
)
from benchmarks.audit.stages import Stages
from benchmarks.audit.world import user_seed

Masks = npt.NDArray[np.bool_]

_PROCESSES = 2
_MOST_WORK = 12_000_000
_MOST_ROWS = 1600
_STARTS = 900
_BLOCKS = (1, 10, 100, 1000)
_MOST_SAMPLES = 6000


def check_sampling(stages: Stages) -> list[str]:
    """Return what is wrong with the batches, in words."""
    configuration = stages.configuration
    rate, ranks = configuration.sample_rate, configuration.world_size

    def draw(rank: int, samples: int, steps: int) -> list[list[int]]:
        with user_seed():
            sampler = stages.sampler(rank, samples, steps)
            # A second iteration goes on, as a second epoch does.
            return [list(batch) for _ in range(2) for batch in sampler]

    samples = min(max(600, round(30 / rate)), _MOST_SAMPLES)
    rows = min(_MOST_ROWS, _MOST_WORK // samples)
    steps = max(20, rows // (_PROCESSES * ranks) // 2 * 2)
    masks, problems = _collect(draw, ranks, samples, steps, _PROCESSES)
    problems = problems or examine(masks, rate)
    if not problems:
        few = max(1, round(0.7 / rate))
        masks, problems = _collect(draw, 1, few, 300, 1)
        problems = problems or _sizes(masks, rate, exact=True)

    enough = min(20_000, math.ceil(25 / (rate * (1 - rate)))) if rate < 1 else 1

    def first_batch(rank: int) -> bytes:
        with user_seed():
            sampler = stages.sampler(rank, enough, 1)
            return np.asarray(next(iter(sampler)), dtype=np.int64).tobytes()

    pairs = _STARTS**2 / 2
    if pairs * (rate**2 + (1 - rate) ** 2) ** enough < SHARES["sampling: seeds"]:
        firsts = [first_batch(start % ranks) for start in range(_STARTS)]
        problems += _few_seeds(firsts, problems)
    return problems


def _collect(
    draw: Callable[[int, int, int], list[list[int]]],
    ranks: int,
    samples: int,
    steps: int,
    processes: int,
) -> tuple[Masks, list[str]]:
    """Draw batches on all ranks in several processes.

    Args:
        draw: makes twice as many batches as asked for, of a rank and a number of samples.

    Returns:
        Who was drawn, (processes, ranks, steps, samples), and what was wrong on the way.
    """
    masks = np.zeros((processes, ranks, steps, samples), dtype=np.bool_)
    for process, rank in itertools.product(range(processes), range(ranks)):
        batches = draw(rank, samples, steps // 2)
        if len(batches) != steps:
            problem = (
                f"rank {rank} draws {len(batches)} batches where {steps} were asked for: steps are "
                "counted beforehand, and empty batches are steps, too"
            )
            return masks, [problem]
        for step, indices in enumerate(batches):
            if len(set(indices)) < len(indices):
                problem = (
                    f"rank {rank} draws a sample twice for step {step + 1}: it would count twice "
                    "in the sum, by 2 C"
                )
                return masks, [problem]
            masks[process, rank, step, indices] = True
    return masks, []


def examine(masks: Masks, rate: float) -> list[str]:
    """Return what is wrong with masks, (processes, ranks, steps, samples)."""
    problems = _rates(masks, rate)
    if 0 < masks.mean() < 1:
        problems += _sizes(masks, rate, exact=False)
        problems += _turns(masks)
        problems += _alike(masks)
        problems += _together(masks)
        problems += _shifted(masks)
    return problems


def _rates(masks: Masks, rate: float) -> list[str]:
    """Look for who is drawn more often than claimed: ranks, steps, blocks of samples."""
    processes, ranks, steps, samples = masks.shape
    groups: list[tuple[str, int, int]] = []
    for process, rank in itertools.product(range(processes), range(ranks)):
        part = masks[process, rank]
        groups.append((f"rank {rank} in process {process + 1}", int(part.sum()), part.size))
    by_step = masks.sum((0, 1, 3))
    for step in range(steps):
        groups.append((f"step {step + 1}", int(by_step[step]), processes * ranks * samples))
    for period in range(2, min(17, steps)):
        for rest in range(period):
            chosen = by_step[rest::period]
            what = f"every step n with n mod {period} = {(rest + 1) % period}"
            groups.append((what, int(chosen.sum()), len(chosen) * processes * ranks * samples))
    by_sample = masks.sum((0, 2))
    for rank, counts in [*enumerate(by_sample), (-1, by_sample.sum(0))]:
        trials = processes * steps * (ranks if rank < 0 else 1)
        where = f" of rank {rank}" if rank >= 0 else ""
        for size in (size for size in _BLOCKS if size < samples):
            starts = np.arange(0, samples, size)
            totals = np.add.reduceat(counts, starts)
            sizes = np.diff([*starts, samples])
            over = (totals / sizes - rate * trials) / np.sqrt(sizes)
            worst = int(over.argmax())
            what = f"sample {worst}" if size == 1 else f"samples from {worst * size} on"
            groups += [(what + where, int(totals[worst]), int(sizes[worst]) * trials)]
    # The worst of each kind stands for all of its blocks.
    comparisons = len(groups) + (ranks + 1) * samples * 2
    allowed = math.log(chance("sampling: rate", comparisons))
    for what, found, trials in groups:
        if found > rate * trials and float(log_tail(found, trials, rate)) < allowed:
            return [
                f"{what} is drawn with probability {found / trials:.3g}, not with the sample_rate "
                f"{rate:g} that is claimed"
                if what.startswith("sample")
                else f"{what} draws samples with probability {found / trials:.3g}, not with the "
                f"sample_rate {rate:g} that is claimed"
            ]
    return []


def _sizes(masks: Masks, rate: float, *, exact: bool) -> list[str]:
    """Look at how many are drawn: batches of one size, or together, or never none."""
    _processes, _ranks, _steps, samples = masks.shape
    sizes = masks.sum(3).astype(np.float64).reshape(-1)
    # To draw less often than claimed is no fault.
    q = min(float(masks.mean()), rate)
    problems = []
    spread = _dispersion(sizes, samples, q)
    if abs(spread) > _dispersion_limit("sampling: sizes", 4):
        kind = "less" if spread < 0 else "more"
        problems.append(
            f"batch sizes vary {kind} than those of Poisson sampling (variance "
            f"{sizes.var():.3g}, not {samples * q * (1 - q):.3g}): samples are not drawn "
            "independently of each other"
        )
    if exact:
        empty = int((sizes == 0).sum())
        usual = (1 - q) ** samples
        if 0 < usual < 1 and float(log_tail(empty, len(sizes), usual)) < math.log(
            chance("sampling: sizes", 4)
        ):
            problems.append(
                f"{empty} of {len(sizes)} batches are empty, where {usual * len(sizes):.0f} would "
                "be chance: an empty batch is a step like all others"
            )
    return problems[:1]


def _dispersion(counts: npt.NDArray[np.float64], trials: int, rate: float) -> float:
    """Return how far the variance of binomial counts is off, in standard deviations of chance."""
    variance = trials * rate * (1 - rate)
    if variance == 0:
        return 0.0
    fourth = variance * (1 + 3 * (trials - 2) * rate * (1 - rate))
    squares = (counts - trials * rate) ** 2
    of_squares = max(fourth - variance**2, 1e-12)
    return float((squares.sum() - len(counts) * variance) / math.sqrt(len(counts) * of_squares))


def _dispersion_limit(test: str, comparisons: int) -> float:
    # Sums of squares have longer tails than normal variables.
    return 1.5 * normal_limit(chance(test, comparisons))


def _turns(masks: Masks) -> list[str]:
    """Look at how often each sample is drawn: all equally often, or some much more often."""
    processes, ranks, steps, samples = masks.shape
    rate = float(masks.mean())
    limit = _dispersion_limit("sampling: samples", 4)
    # Shuffling deals out all samples before any comes again, in windows of unknown length.
    lengths = {steps, max(2, steps // 2), min(steps, max(2, round(1 / rate)))}
    for length in sorted(lengths):
        whole = steps // length * length
        windows = masks[:, :, :whole].reshape(processes, ranks, -1, length, samples)
        counts = windows.sum(3).astype(np.float64).reshape(-1)
        spread = _dispersion(counts, length, rate)
        if spread < -limit:
            return [
                f"over {length} steps samples are drawn almost equally often (variance "
                f"{counts.var():.3g}, not {length * rate * (1 - rate):.3g}): they are dealt out in "
                "turns, which is not Poisson sampling"
            ]
        if spread > limit:
            return [
                f"over {length} steps some samples are drawn much more often than others "
                f"(variance {counts.var():.3g}, not {length * rate * (1 - rate):.3g}): steps are "
                "not independent, or samples have rates of their own"
            ]
    return []


def _alike(masks: Masks) -> list[str]:
    """Compare all pairs of batches, and all at one distance: too many or too few in common."""
    processes, ranks, steps, samples = masks.shape
    rows = masks.reshape(-1, samples).astype(np.float32)
    common = rows @ rows.T
    rate = float(masks.mean())
    one, other = np.triu_indices(len(rows), 1)
    shared = common[one, other]
    allowed = math.log(chance("sampling: pairs", 2 * len(one)))
    tails = log_tail(shared, samples, rate * rate)
    over = (tails < allowed) & (shared > samples * rate * rate)
    if over.any():
        worst = int(np.where(over, -tails, -np.inf).argmax())
        found = int(over.sum())
        more = f" (and {found - 1} more pairs)" if found > 1 else ""
        names = [_batch(int(i), ranks, steps) for i in (one[worst], other[worst])]
        return [
            f"{names[0]} and {names[1]}{more} draw the same samples: {shared[worst]:.0f} of "
            f"{rows[one[worst]].sum():.0f} in common, where {rate * rate * samples:.0f} would be "
            "chance. Who sees one batch knows the other, and sampling protects nobody. Draw from a "
            "secret of each process"
        ]
    centred = (rows - rate) / math.sqrt(rate * (1 - rate))
    products = (centred @ centred.T).reshape(processes * ranks, steps, processes * ranks, steps)
    series = list(itertools.combinations_with_replacement(range(processes * ranks), 2))
    limit = 1.15 * normal_limit(chance("sampling: lags", len(series) * 2 * steps))
    worst_pair: tuple[float, str] = (0.0, "")
    for a, b in series:
        for lag in range(-steps + 2, steps - 1):
            if a == b and lag <= 0:
                continue
            diagonal = np.diagonal(products[a, :, b], lag)
            deviations = float(diagonal.sum()) / math.sqrt(len(diagonal) * samples)
            # Few expected in common: a sum of rare events is not normal.
            if len(diagonal) * samples * rate * rate < 50:
                continue
            if abs(deviations) > limit and abs(deviations) > abs(worst_pair[0]):
                names = [f"rank {c % ranks} in process {c // ranks + 1}" for c in (a, b)]
                what = f"batches of {names[0]} and those of {names[1]}, {lag} steps later,"
                worst_pair = deviations, what
    if worst_pair[0]:
        kind = "more" if worst_pair[0] > 0 else "fewer"
        return [
            f"{worst_pair[1]} have {kind} samples in common than chance has it "
            f"({abs(worst_pair[0]):.0f} standard deviations): every batch is to be drawn for itself"
        ]
    return []


def _batch(row: int, ranks: int, steps: int) -> str:
    process, rank, step = row // steps // ranks, row // steps % ranks, row % steps
    return f"rank {rank} in process {process + 1} (step {step + 1})"


def _together(masks: Masks) -> list[str]:
    """Look for samples that are drawn with others: neighbours, at any distance, and any pairs."""
    samples = masks.shape[-1]
    rows = masks.reshape(-1, samples)
    rate = float(rows.mean())
    centred = (rows - rate) / math.sqrt(rate * (1 - rate))
    allowed = chance("sampling: samples", 4)
    if found := strongest_lag(centred, centred, 50 / rate**2, allowed, forward=True):
        distance, deviations = found
        return [
            f"samples {distance} apart are drawn together {_more(deviations)} often than chance "
            f"has it ({abs(deviations):.0f} standard deviations): each is to be drawn for itself"
        ]
    some = rows[:, : min(samples, 1500)].astype(np.float32)
    common = np.triu(some.T @ some, 1)
    pairs = some.shape[1] * (some.shape[1] - 1) // 2
    most = float(common.max())
    if most > len(rows) * rate * rate and float(log_tail(most, len(rows), rate * rate)) < math.log(
        chance("sampling: samples", 4 * pairs)
    ):
        i, j = np.unravel_index(int(common.argmax()), common.shape)
        return [
            f"samples {i} and {j} are drawn together {most:.0f} times in {len(rows)} batches, "
            f"where {len(rows) * rate * rate:.0f} would be chance: each is to be drawn for itself"
        ]
    return []


def _shifted(masks: Masks) -> list[str]:
    """Look for two ranks of which one draws what the other does, so many samples further on."""
    _, ranks, _, samples = masks.shape
    pairs = list(itertools.combinations(range(ranks), 2))
    by_rank = masks.swapaxes(0, 1).reshape(ranks, -1, samples)
    rate = float(masks.mean())
    centred = (by_rank - rate) / math.sqrt(rate * (1 - rate))
    allowed = chance("sampling: shifts", len(pairs))
    for one, other in pairs:
        if found := strongest_lag(centred[one], centred[other], 50 / rate**2, allowed):
            shift, deviations = found
            return [
                f"sample i of rank {one} and sample i{shift:+d} of rank {other} are drawn together "
                f"{_more(deviations)} often than chance has it ({abs(deviations):.0f} standard "
                "deviations): every rank is to draw for itself"
            ]
    return []


def _more(deviations: float) -> str:
    return "more" if deviations > 0 else "less"


def _few_seeds(firsts: list[bytes], known: list[str]) -> list[str]:
    """Look for two of many processes that draw the same batch, unless that is known."""
    same = len(firsts) - len(set(firsts))
    if not same or any("draw the same" in problem for problem in known):
        return []
    return [
        f"of {len(firsts)} processes {same} drew the batch of another one: its seed has so few "
        "bits that all can be tried"
    ]
