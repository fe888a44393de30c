"""Is the added noise normal, large enough everywhere, and never used twice?

The mechanism is played without a compressor: many steps of parameters of all shapes, a few steps of
large ones, and many starts.  Sums are zero, small and huge, and are subtracted again.
"""

import math
import operator
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from benchmarks.audit.checks.chances import (
    chance,
    largest_correlation,
    log_tail,
    normal_limit,
    smallest_energy,
    strongest_lag,
)
from benchmarks.audit.configuration import Stages
from benchmarks.audit.world import SHAPES, Shapes, World

_LONG_STEPS = (160, 40, 40)
# The library draws noise in pieces of 2^16 elements.
_LARGE: Shapes = {"embedding.weight": (300, 350), "norm.weight": (7,), "head.weight": (70_001,)}
_LARGE_STEPS = (5, 3)
_LENGTHS = (0.0, 0.3, 1.0, 30.0)
_HUGE = 1e4
_STARTS = 900
_MOST_PERIOD = 16
_BLOCKS = (1, 8, 64, 512, 4096, 32768)
# With fewer steps the rounding of a single element may hide its noise.
_FEWEST_STEPS = 4
_FEWEST_ELEMENTS = 32
_TAILS = (1.5, 2.0, 2.5, 3.0, 3.5, 4.0, 4.5)
# Of a variance: the effect of rounding.
_SLACK = 5e-3


@dataclass(frozen=True)
class Noise:
    """The noise of several steps.

    Attributes:
        values: (steps, elements), over the claimed standard deviation.
        labels: of the steps, such as ``"step 3 of process 1"``.
        steps: their numbers within their processes.
        parts: the name, start and end of each parameter.
    """

    values: torch.Tensor
    labels: Sequence[str]
    steps: Sequence[int]
    parts: Sequence[tuple[str, int, int]]


@dataclass(frozen=True)
class _Played:
    """The noise of the releases and of each rank's messages, and the clean sums over C."""

    released: Noise
    sums: torch.Tensor
    sent: Noise | None
    reported: float | None
    consistent: bool


def check_noise(stages: Stages) -> Iterator[str]:
    """Yield the faults of the noise, one line each."""
    configuration = stages.configuration
    of_rank = f"that placement {configuration.placement!r} claims for the message of one rank"
    of_sum = "that is claimed for the sum over ranks"
    of_all, of_sent = chance("noise: energy", 2), chance("messages: energy", 2)
    twice, sent_twice = chance("noise: correlation", 2), chance("messages: correlation", 2)
    needs_variance = configuration.optimizer is not None
    checks: list[Callable[[_Played], list[str]]] = [
        lambda one: too_quiet(one.released, of_sum, of_all),
        lambda one: repeated(one.released, twice),
        lambda one: _shifted(one.released),
        lambda one: _misshapen(one.released),
        _follows_data,
        lambda one: _misreported(one, needed=needs_variance),
        lambda one: too_quiet(one.sent, of_rank, of_sent) if one.sent else [],
        lambda one: repeated(one.sent, sent_twice) if one.sent else [],
    ]
    repeats = False
    for shapes, steps in ((SHAPES, _LONG_STEPS), (_LARGE, _LARGE_STEPS)):
        played = _play(stages, shapes, steps)
        for check in checks.copy():
            if problems := check(played):
                yield from problems
                repeats |= any("is correlated by" in problem for problem in problems)
                checks.remove(check)  # say it once
    if not repeats:
        yield from _few_seeds(stages)


def claimed_deviation(stages: Stages, noise_multiplier: float) -> float:
    """Return the claimed standard deviation of the uncompressed sum over ranks."""
    configuration = stages.configuration
    ranks = configuration.world_size if configuration.placement == "local" else 1
    return math.sqrt(ranks) * noise_multiplier * configuration.max_grad_norm


def _play(stages: Stages, shapes: Shapes, processes: Sequence[int]) -> _Played:
    configuration = stages.configuration
    ranks, norm = configuration.world_size, configuration.max_grad_norm
    sigma = configuration.noise_multiplier
    world = World(stages, shapes, sigma, dense=True)
    rng = np.random.default_rng()
    released, clean, sent = [], [], []
    labels, numbers = [], []
    place = -1
    for process, step in world.steps(*processes):
        sums = world.sums()
        for of_rank in sums if step % 3 else ():
            vector = torch.from_numpy(rng.standard_normal(world.numel))
            length = _HUGE if step % 6 == 1 else rng.choice(_LENGTHS)
            of_rank.copy_(vector * (length * max(1.0, sigma) * norm / vector.norm()))
        clean.append(sums.clone())
        released.append(world.release())
        numbers.append(step)
        labels.append(f"step {step + 1} of process {process + 1}")
        if len(released) == 1:
            place = _place_of_vector(world, released[0], configuration.placement)
        if place >= 0:
            sent.append(world.sent[-1][:, place : place + world.numel].clone())
    y, of_ranks = torch.stack(released), torch.stack(clean)
    s = of_ranks.sum(1)
    deviation, gain = claimed_deviation(stages, sigma), gain_of(y, s)
    noise = Noise((y / gain - s) / deviation, labels, numbers, world.parts)
    messages = None
    if sent:
        share = math.sqrt(ranks) if configuration.placement == "shares" else 1.0
        messages = Noise(
            (torch.cat(sent) - of_ranks.flatten(0, 1)) * (share / (sigma * norm)),
            [f"rank {rank} in {label}" for label in labels for rank in range(ranks)],
            [number for number in numbers for _ in range(ranks)],
            world.parts,
        )
    reported = world.reported_variance
    if reported is not None:
        reported /= (deviation * gain) ** 2
    return _Played(noise, s / norm, messages, reported, world.consistent)


def gain_of(released: torch.Tensor, sums: torch.Tensor) -> float:
    """Return the factor between sums and releases: a private step may be scaled by any."""
    norms = torch.linalg.vector_norm(sums, dim=1)
    huge = norms > 0.1 * norms.max()
    s, released = sums[huge].double(), released[huge]
    found = float((released.double() * s).sum() / s.square().sum())
    return found if math.isfinite(found) and abs(found) > 1e-6 and abs(found - 1) > 5e-3 else 1.0


def _place_of_vector(world: World, released: torch.Tensor, placement: str) -> int:
    """Return the start of the vector in a rank's payload, or -1."""
    if placement not in ("shares", "local") or not world.sent:
        return -1
    sent = world.sent[-1].sum(0)
    if sent.dtype != torch.float32 or sent.dim() > 1:
        return -1
    for place in range(len(sent) - len(released) + 1):
        if torch.allclose(sent[place : place + len(released)], released, rtol=1e-3, atol=1e-6):
            return place
    return -1


def too_quiet(noise: Noise, claim: str, allowed: float) -> list[str]:
    """Report noise that is too small: in all, a parameter, a step, every n-th step or an element.

    Args:
        claim: names the claim in the message.
        allowed: the probability of a false alarm.
    """
    squares = noise.values.double().square()
    rows, numel = squares.shape
    by_step, by_element = squares.sum(1), squares.sum(0)
    groups = [("", float(by_step.sum()), rows * numel)]
    for name, start, end in noise.parts:
        groups.append((f", in {name}", float(by_element[start:end].sum()), rows * (end - start)))
    for label, row, total in zip(noise.labels, squares, by_step, strict=True):
        groups.append((f", in {label}", float(total), numel))
        for name, start, end in noise.parts:
            groups.append((f", in {label}, {name}", float(row[start:end].sum()), end - start))
    numbers = torch.tensor(noise.steps)
    for period in range(2, min(_MOST_PERIOD, rows // 2) + 1):
        for rest in range(period):
            chosen = numbers % period == rest
            what = f", in every step n with n mod {period} = {(rest + 1) % period}"
            groups.append((what, float(by_step[chosen].sum()), int(chosen.sum()) * numel))
    for size in _BLOCKS if rows >= _FEWEST_STEPS else _BLOCKS[1:]:
        starts = range(0, numel, size) if size < numel else range(0)
        for start, energy in zip(starts, np.add.reduceat(by_element.numpy(), starts), strict=True):
            end = min(numel, start + size)
            groups.append((f", in elements {start} to {end - 1}", energy, rows * (end - start)))
    each = allowed / len(groups)
    counts = {n for _, _, n in groups if n}
    limits = {n: min(smallest_energy(n, each), 1 - _SLACK) for n in counts}
    small = [(n, what, x / n) for what, x, n in groups if n and not x / n >= limits[n]]
    if not small:
        return []
    # A part without noise makes the whole too quiet as well: name the part.
    least = min(ratio for *_, ratio in small)
    quietest = [group for group in small if group[2] <= 2.5 * least]
    _, what, ratio = max(quietest, key=operator.itemgetter(0))
    return [f"the noise has {math.sqrt(ratio):.3g} times the standard deviation {claim}{what}"]


def repeated(noise: Noise, allowed: float, other: Noise | None = None) -> list[str]:
    """Report two correlated steps.

    Args:
        allowed: the probability of a false alarm.
        other: the noise of a run with other secrets, to compare with; by default the noise itself.
    """
    second = other or noise
    parts = [("", 0, noise.values.shape[1])]
    parts = [part for part in [*parts, *noise.parts] if part[2] - part[1] >= _FEWEST_ELEMENTS]
    pairs = len(noise.values) * len(second.values)
    for name, start, end in parts:
        cosines = _unit_rows(noise.values[:, start:end]) @ _unit_rows(second.values[:, start:end]).T
        if other is None:
            cosines = cosines.triu(1)
        limit = largest_correlation(end - start, allowed / (pairs * len(parts)))
        found = (~(cosines.abs() < limit)).nonzero()
        if len(found):
            i, j = found[cosines.abs()[found[:, 0], found[:, 1]].argmax()].tolist()
            more = f" (and {len(found) - 1} more pairs)" if len(found) > 1 else ""
            where = f" in {name}" if name else ""
            hint = "it follows from a seed, and anyone with that seed can remove it"
            if other is None:
                hint = "their difference shows the data. Draw a new secret in every process, and "
                hint += "never the same stream twice"
            return [
                f"the noise of {noise.labels[i]} and of {second.labels[j]}{more} is correlated by "
                f"{float(cosines[i, j]):.2f}{where}: {hint}"
            ]
    return []


def _unit_rows(rows: torch.Tensor) -> torch.Tensor:
    return rows / torch.linalg.vector_norm(rows, dim=1, keepdim=True).clamp(min=1e-30)


def _shifted(noise: Noise) -> list[str]:
    """Report elements that are correlated with others at a fixed distance, in any step."""
    z = (_unit_rows(noise.values) * math.sqrt(noise.values.shape[1])).numpy()
    steps = np.array(noise.steps)
    starts, later = np.flatnonzero(steps == 0), np.flatnonzero(steps)
    again = np.arange(starts[1] if len(starts) > 1 else len(steps), len(steps))
    for what, one, other in (
        ("within a step", z, z),
        ("of consecutive steps", z[later - 1], z[later]),
        ("of a step and the same one after a restart", z[steps[again]], z[again]),
    ):
        allowed = chance("noise: lags", 3)
        found = strongest_lag(one, other, 500, allowed, forward=one is z) if len(one) else None
        if found:
            return [
                f"the noise of elements {abs(found[0])} apart, {what}, is correlated "
                f"({abs(found[1]):.0f} standard deviations of chance): draw every element, of "
                "every parameter and rank, independently"
            ]
    return []


def _misshapen(noise: Noise) -> list[str]:
    """Compare the distribution with the normal one, as a whole and in its tails."""
    scaled = []
    for _, start, end in noise.parts:
        part = noise.values[:, start:end].double()
        if part.numel() >= 5000:
            scaled.append((part / part.square().mean().sqrt()).flatten())
    values = torch.cat(scaled).sort().values
    count = len(values)
    allowed = chance("noise: shape", 4 * (1 + len(_TAILS)))
    expected = torch.special.ndtr(values)
    steps = torch.arange(count + 1, dtype=torch.float64) / count
    distance = float(torch.maximum(steps[1:] - expected, expected - steps[:-1]).max())
    # Dvoretzky, Kiefer and Wolfowitz, and the error of the standard deviation.
    if not distance < math.sqrt(math.log(2 / allowed) / (2 * count)) + 1 / math.sqrt(count):
        return [
            f"the noise is not normal: its distribution function is off by {distance:.3f}, and "
            "the claim for normal noise does not hold"
        ]
    for limit in _TAILS:
        beyond = int((values.abs() > limit).sum())
        usual = math.erfc(limit / math.sqrt(2))
        off = 5 * limit**2 / math.sqrt(2 * count)
        rate = usual * (1 + off if beyond > usual * count else 1 - off)
        is_off = (beyond - rate * count) * (beyond - usual * count) > 0
        if is_off and float(log_tail(beyond, count, rate)) < math.log(allowed):
            return [
                f"the noise is not normal: {beyond} of {count} numbers are beyond {limit:g} "
                f"standard deviations instead of {usual * count:.0f}: truncated tails show members"
            ]
    return []


def _follows_data(played: _Played) -> list[str]:
    """Report noise that depends on the sums, their signs or their sizes."""
    norms = torch.linalg.vector_norm(played.sums.double(), dim=1)
    # float32 rounds huge sums by more than nothing.
    usual = (norms > 0) & (norms < 1e3)
    z, s = _unit_rows(played.released.values[usual].double()), played.sums[usual].double()

    def centred(rows: torch.Tensor) -> torch.Tensor:
        return rows - rows.mean(1, keepdim=True)

    for what, one, other in (
        ("the sums", z, s),
        ("their signs", z, s.sign()),
        ("their sizes", centred(z.abs()), centred(s.abs())),
    ):
        cosines = (_unit_rows(one) * _unit_rows(other)).sum(1)
        deviations = float(cosines.sum()) * math.sqrt(z.shape[1] / max(1, len(z)))
        if abs(deviations) > normal_limit(chance("noise: data", 6)) + 0.5:
            return [
                f"the noise depends on {what} ({abs(deviations):.0f} standard deviations of "
                "chance): draw it from a secret alone"
            ]
    return []


def _misreported(played: _Played, *, needed: bool) -> list[str]:
    if not played.consistent:
        return ["ranks release different vectors: their mean has less noise than is claimed"]
    values, reported = played.released.values, played.reported
    found = float(values.double().square().mean())
    deviation = normal_limit(chance("noise: reported variance", 4)) * math.sqrt(2 / values.numel())
    if reported and (found < reported or needed):
        if not abs(found / reported - 1) < deviation + 2 * _SLACK:
            return [
                f"the noise has {found / reported:.2f} times the variance of "
                "Released.noise_variance: optimizers would subtract the wrong one"
            ]
    return []


def _few_seeds(stages: Stages) -> list[str]:
    """Start many processes, and report two with the same noise."""
    configuration = stages.configuration
    world = World(stages, {"weight": (8, 8)}, configuration.noise_multiplier, dense=True)
    rows = []
    for _ in range(_STARTS // configuration.world_size + 1):
        world.start()
        world.sums()
        released = world.release()
        place = _place_of_vector(world, released, configuration.placement)
        rows.append(world.sent[-1][:, place : place + 64] if place >= 0 else released[None])
    values = torch.cat(rows).numpy()
    # The owners of shards draw independently, so compare pieces.
    pieces = np.ascontiguousarray(values).reshape(len(values), 16, 4).view("V16")[:, :, 0]
    same = max(len(piece) - len(np.unique(piece)) for piece in pieces.T)
    if not same:
        return []
    return [
        f"{same} of {len(values)} processes had the noise of another one: all seeds of so few "
        "bits can be tried"
    ]
