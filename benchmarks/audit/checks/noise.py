"""Is what is added to the sums normal, large enough everywhere, and never used twice?

The mechanism is played without a compressor, on many steps of parameters of all shapes, a few steps
of large ones, and many starts; sums are zero, small and huge, and are subtracted again.
"""

import math
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
from benchmarks.audit.stages import Stages
from benchmarks.audit.world import SHAPES, Shapes, World

_LONG_STEPS = (160, 40, 40)
# Noise is drawn in pieces, of 2^16 elements here.
_LARGE: Shapes = {"embedding.weight": (300, 350), "norm.weight": (7,), "head.weight": (70_001,)}
_LARGE_STEPS = (5, 3)
_LENGTHS = (0.0, 0.3, 1.0, 30.0)
_HUGE = 1e4
_STARTS = 900
_MOST_PERIOD = 16
_BLOCKS = (1, 8, 64, 512, 4096, 32768)
_MOST_VALUES = 1 << 17
_SAME_VALUES = 0.2
_TAILS = (1.5, 2.0, 2.5, 3.0, 3.5, 4.0, 4.5)
# Of a variance: what roundings may do.
_SLACK = 5e-3


@dataclass(frozen=True)
class Noise:
    """What was added to sums.

    Attributes:
        values: (rows, d), over the standard deviation that is claimed.
        sums: what was there without, (rows, d), in multiples of C.
        labels: of the rows.
        steps: their numbers within their processes.
        parts: the name, start and end of each parameter.
    """

    values: torch.Tensor
    sums: torch.Tensor
    labels: list[str]
    steps: list[int]
    parts: list[tuple[str, int, int]]


@dataclass(frozen=True)
class _Played:
    """Noise in what is released, in what each rank sent (or nothing), and what was said of it."""

    released: Noise
    sent: Noise | None
    reported: float | None
    alike: bool


def check_noise(stages: Stages) -> Iterator[str]:
    """Yield what is wrong with the noise, in words."""
    configuration = stages.configuration
    needed = configuration.optimizer is not None
    of_ranks = f"that placement {configuration.placement!r} claims for what one rank sends"
    of_sum = "that is claimed for the sum over ranks"
    checks: list[Callable[[_Played], list[str]]] = [
        lambda one: too_quiet(one.released, "noise: energy", of_sum, 2),
        lambda one: repeated(one.released, "noise: correlation", 2) or _narrow(one.released),
        lambda one: _shifted(one.released),
        lambda one: _few_values(one.released),
        lambda one: _misshapen(one.released),
        lambda one: _follows_data(one.released),
        lambda one: _misreported(one, needed=needed),
        lambda one: too_quiet(one.sent, "messages: energy", of_ranks, 2) if one.sent else [],
        lambda one: repeated(one.sent, "messages: correlation", 2) if one.sent else [],
    ]
    missing = checks
    repeats = False
    for shapes, steps in ((SHAPES, _LONG_STEPS), (_LARGE, _LARGE_STEPS)):
        played = _play(stages, shapes, steps)
        # What is found in many steps is not said again of large parameters.
        checks, missing = missing, []
        for check in checks:
            problems = check(played)
            yield from problems
            repeats |= any("is correlated by" in problem for problem in problems)
            if not problems:
                missing.append(check)
    if not repeats:
        yield from _few_seeds(stages)


def claimed_deviation(stages: Stages, noise_multiplier: float) -> float:
    """Return the standard deviation that is claimed for the sum over ranks, uncompressed."""
    configuration = stages.configuration
    ranks = configuration.world_size if configuration.placement == "local" else 1
    return math.sqrt(ranks) * noise_multiplier * configuration.max_grad_norm


def _play(stages: Stages, shapes: Shapes, processes: Sequence[int]) -> _Played:
    configuration = stages.configuration
    ranks, norm = configuration.world_size, configuration.max_grad_norm
    world = World(stages, shapes, configuration.noise_multiplier, dense=True)
    rng = np.random.default_rng()
    released, clean, sent, clean_of_ranks = [], [], [], []
    labels, numbers = [], []
    place: int | None = None
    for process, step in world.steps(*processes):
        sums = world.sums()
        if step % 3:
            for of_rank in sums:
                vector = torch.from_numpy(rng.standard_normal(world.numel))
                length = _HUGE if step % 6 == 1 else rng.choice(_LENGTHS)
                length *= max(1.0, configuration.noise_multiplier)
                of_rank.copy_(vector * (length * norm / vector.norm()))
        kept = sums.clone()
        released.append(world.release())
        clean.append(kept.sum(0))
        numbers.append(step)
        labels.append(f"step {step + 1} of process {process + 1}")
        if configuration.placement in ("shares", "local") and world.sent:
            if place is None:
                place = _find(world.sent[-1].sum(0), released[-1])
            if place >= 0:
                sent.append(world.sent[-1][:, place : place + world.numel].clone())
                clean_of_ranks.append(kept)
    y, s = torch.stack(released), torch.stack(clean)
    gain = gain_of(y, s)
    values = (y / gain - s) / claimed_deviation(stages, configuration.noise_multiplier)
    of_sum = Noise(values, s / norm, labels, numbers, world.parts)
    of_ranks = None
    if sent:
        share = math.sqrt(ranks) if configuration.placement == "shares" else 1.0
        deviation = configuration.noise_multiplier * norm / share
        own = torch.cat(clean_of_ranks)
        rows = [f"rank {rank} in {label}" for label in labels for rank in range(ranks)]
        steps_of_rows = [number for number in numbers for _ in range(ranks)]
        values = (torch.cat(sent) - own) / deviation
        of_ranks = Noise(values, own / norm, rows, steps_of_rows, world.parts)
    reported = world.reported_variance
    if reported is not None:
        reported /= (claimed_deviation(stages, configuration.noise_multiplier) * gain) ** 2
    return _Played(of_sum, of_ranks, reported, world.alike)


def gain_of(released: torch.Tensor, sums: torch.Tensor) -> float:
    """Return by how much sums are scaled: a step that is private may be scaled by anything."""
    norms = torch.linalg.vector_norm(sums, dim=1)
    huge = norms > 0.1 * norms.max()
    s, released = sums[huge].double(), released[huge]
    found = float((released.double() * s).sum() / s.square().sum())
    return found if math.isfinite(found) and abs(found) > 1e-6 and abs(found - 1) > 5e-3 else 1.0


def _find(sent: torch.Tensor, released: torch.Tensor) -> int:
    """Return where in a payload the vector is, or -1."""
    if sent.dtype != torch.float32 or sent.dim() > 1:
        return -1
    for place in range(len(sent) - len(released) + 1):
        if torch.allclose(sent[place : place + len(released)], released, rtol=1e-3, atol=1e-6):
            return place
    return -1


def too_quiet(noise: Noise, test: str, than: str, tests: int = 1) -> list[str]:
    """Look for noise that is too small: in all, parameters, steps, every n-th step and elements."""
    squares = noise.values.double().square()
    rows, numel = squares.shape
    by_step, by_element = squares.sum(1), squares.sum(0)
    groups: list[tuple[str, float, int]] = [("", float(by_step.sum()), rows * numel)]
    for name, start, end in noise.parts:
        groups.append((f"in {name}", float(by_element[start:end].sum()), rows * (end - start)))
    for (name, start, end), (label, row) in (
        (part, labelled)
        for labelled in zip(noise.labels, squares, strict=True)
        for part in [("", 0, numel), *noise.parts]
    ):
        what = f"{label}, {name}" if name else label
        groups.append((f"in {what}", float(row[start:end].sum()), end - start))
    numbers = torch.tensor(noise.steps)
    for period in range(2, min(_MOST_PERIOD, rows // 2) + 1):
        for rest in range(period):
            chosen = numbers % period == rest
            what = f"in every step n with n mod {period} = {(rest + 1) % period}"
            groups.append((what, float(by_step[chosen].sum()), int(chosen.sum()) * numel))
    for size in (size for size in _BLOCKS if size < numel):
        for start in range(0, numel, size):
            end = min(numel, start + size)
            what = f"in elements {start} to {end - 1}"
            groups.append((what, float(by_element[start:end].sum()), rows * (end - start)))
    allowed = chance(test, tests * len(groups))
    limits: dict[int, float] = {}
    for what, energy, terms in groups:
        if not terms:
            continue
        if terms not in limits:
            limits[terms] = min(smallest_energy(terms, allowed), 1 - _SLACK)
        if not energy / terms >= limits[terms]:
            return [
                f"the noise has {energy / terms:.2f} times the variance {than}"
                + (f", {what}" if what else "")
            ]
    return []


def repeated(noise: Noise, test: str, tests: int = 1) -> list[str]:
    """Look for rows that are correlated, of any two."""
    rows = len(noise.values)
    pairs = rows * (rows - 1) // 2
    parts = [("", 0, noise.values.shape[1])]
    parts += [part for part in noise.parts if part[2] - part[1] >= 32]
    for name, start, end in parts:
        unit = _unit_rows(noise.values[:, start:end])
        cosines = (unit @ unit.T).triu(1)
        limit = largest_correlation(end - start, chance(test, tests * pairs * len(parts)))
        found = (~(cosines.abs() < limit)).nonzero()
        if len(found):
            i, j = found[cosines.abs()[found[:, 0], found[:, 1]].argmax()].tolist()
            more = f" (and {len(found) - 1} more pairs)" if len(found) > 1 else ""
            return [
                f"the noise of {noise.labels[i]} and of {noise.labels[j]}{more} is correlated by "
                f"{float(cosines[i, j]):.2f}{f' in {name}' if name else ''}: their difference "
                "shows the data. Draw a new secret in every process, and never the same stream "
                "twice"
            ]
    return []


def _unit_rows(rows: torch.Tensor) -> torch.Tensor:
    return rows / torch.linalg.vector_norm(rows, dim=1, keepdim=True).clamp(min=1e-30)


def _narrow(noise: Noise) -> list[str]:
    """Look for noise of fewer dimensions than elements: chance correlations are too large."""
    for name, start, end in [("", 0, noise.values.shape[1]), *noise.parts]:
        numel = end - start
        if numel < 100:
            continue
        unit = _unit_rows(noise.values[:, start:end]).double()
        cosines = (unit @ unit.T).triu(1)
        pairs = len(unit) * (len(unit) - 1) / 2
        found = numel * float(cosines.square().sum()) / pairs
        # Of squares of normal variables, whose tails are longer than normal ones.
        limit = 1 + 2 * normal_limit(chance("noise: dimension", 16)) * math.sqrt(2 / pairs)
        if found > limit:
            return [
                f"the noise of {numel} elements{f' in {name}' if name else ''} has about "
                f"{numel / found:.0f} dimensions: what is orthogonal to them is released clean"
            ]
    return []


def _shifted(noise: Noise) -> list[str]:
    """Look for elements that are correlated with others at a fixed distance, in any step."""
    z = (_unit_rows(noise.values) * math.sqrt(noise.values.shape[1])).numpy()
    steps = np.array(noise.steps)
    starts = np.flatnonzero(steps == 0)
    later = np.flatnonzero(steps)
    again = np.arange(starts[1] if len(starts) > 1 else len(steps), len(steps))
    for what, one, other in (
        ("within a step", z, z),
        ("of steps that follow each other", z[later - 1], z[later]),
        ("of a step and that after a restart", z[steps[again]], z[again]),
    ):
        if not len(one):
            continue
        found = strongest_lag(one, other, 500, chance("noise: lags", 3), forward=one is z)
        if found:
            shift, deviations = found
            return [
                f"the noise of elements {abs(shift)} apart, {what}, is correlated "
                f"({abs(deviations):.0f} standard deviations of chance): draw every element, of "
                "every parameter and rank, for itself"
            ]
    return []


def _few_values(noise: Noise) -> list[str]:
    """Look for numbers that come again, where sums were zero: anywhere, of either sign."""
    quiet = noise.values[(noise.sums == 0).all(1)]
    values = quiet.abs().flatten()[:_MOST_VALUES]
    if len(values) < 1000:
        return []
    share = 1 - len(torch.unique(values)) / len(values)
    if share < _SAME_VALUES:
        return []
    return [
        f"{share:.0%} of the numbers in the noise came before: they are used again, or rounded to "
        "few values, which tells what they were added to"
    ]


def _misshapen(noise: Noise) -> list[str]:
    """Compare the distribution with the normal one: as a whole, and at its ends."""
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
    # Dvoretzky, Kiefer and Wolfowitz; and values are over their own standard deviation.
    if not distance < math.sqrt(math.log(2 / allowed) / (2 * count)) + 1 / math.sqrt(count):
        return [
            f"the noise is not normal: its distribution function is off by {distance:.3f}, and "
            "what is claimed for a normal one does not hold"
        ]
    for limit in _TAILS:
        beyond = int((values.abs() > limit).sum())
        usual = math.erfc(limit / math.sqrt(2))
        off = 5 * limit**2 / math.sqrt(2 * count)
        rate = usual * (1 + off if beyond > usual * count else 1 - off)
        if (beyond - rate * count) * (beyond - usual * count) <= 0:
            continue
        if float(log_tail(beyond, count, rate)) < math.log(allowed):
            return [
                f"the noise is not normal: {beyond} of {count} numbers are beyond {limit:g} "
                f"standard deviations, where {usual * count:.0f} would be: ends that are cut show "
                "who took part"
            ]
    return []


def _follows_data(noise: Noise) -> list[str]:
    """Look for noise that knows the sums, their signs or their sizes."""
    busy = (noise.sums != 0).any(1)
    z, s = noise.values[busy].double(), noise.sums[busy].double()
    # float32 rounds huge sums by more than nothing.
    usual = torch.linalg.vector_norm(s, dim=1) < 1e3
    z, s = _unit_rows(z[usual]), s[usual]
    size = z.abs()
    for what, with_ in (
        ("the sums", (z, s)),
        ("their signs", (z, s.sign())),
        ("their sizes", (size - size.mean(1, keepdim=True), s.abs())),
    ):
        one, other = with_
        other = other - other.mean(1, keepdim=True) if what == "their sizes" else other
        cosines = (_unit_rows(one) * _unit_rows(other)).sum(1)
        deviations = float(cosines.sum()) * math.sqrt(z.shape[1] / max(1, len(z)))
        if abs(deviations) > normal_limit(chance("noise: data", 6)) + 0.5:
            return [
                f"the noise depends on {what} ({abs(deviations):.0f} standard deviations of "
                "chance): it must be drawn from nothing but a secret"
            ]
    return []


def _misreported(played: _Played, *, needed: bool) -> list[str]:
    problems = []
    if not played.alike:
        problems.append(
            "ranks release different things: their mean has less noise than is claimed for one"
        )
    values = played.released.values
    found = float(values.double().square().mean())
    deviation = normal_limit(chance("noise: reported variance", 4)) * math.sqrt(2 / values.numel())
    reported = played.reported
    if reported and (found < reported or needed):
        if not abs(found / reported - 1) < deviation + 2 * _SLACK:
            problems.append(
                f"the noise has {found / reported:.2f} times the variance that "
                "Released.noise_variance says: optimizers would subtract the wrong one"
            )
    return problems


def _few_seeds(stages: Stages) -> list[str]:
    """Start many processes, and look for two with the same noise."""
    configuration = stages.configuration
    world = World(stages, {"weight": (8, 8)}, configuration.noise_multiplier, dense=True)
    rows = []
    for _ in range(_STARTS // configuration.world_size + 1):
        world.start()
        world.sums()
        released = world.release()
        apart = configuration.placement in ("shares", "local") and world.sent
        place = _find(world.sent[-1].sum(0), released) if apart else -1
        rows.append(world.sent[-1][:, place : place + 64] if place >= 0 else released[None])
    values = torch.cat(rows).numpy()
    # Owners of shards draw for themselves, so pieces are compared.
    pieces = np.ascontiguousarray(values).reshape(len(values), 16, 4).view("V16")[:, :, 0]
    same = max(len(piece) - len(np.unique(piece)) for piece in pieces.T)
    if not same:
        return []
    return [
        f"of {len(values)} processes {same} had the noise of another one: its seed has so few bits "
        "that all can be tried"
    ]
