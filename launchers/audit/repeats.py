"""Randomness that is used twice: noise of two steps or processes, masks of two ranks."""

import itertools
import math

import torch

from comm_hooks.launchers.audit.bounds import binomial_tail
from comm_hooks.launchers.audit.sampling import draw
from comm_hooks.launchers.audit.stages import Stages
from comm_hooks.launchers.audit.world import World

_NUMEL = 1 << 14
# Of a normal distribution: two in a billion.
_MOST_DEVIATIONS = 6.0
_SAMPLES = 2000
_BATCHES = 40
_CHANCE = 1e-9


def find_repeated_noise(stages: Stages) -> list[str]:
    """Compare the noise of two steps in each of two processes, without data and compression.

    Returns:
        What is wrong, in words: noise of two releases that is correlated by more than 6 standard
        deviations of chance, or whose variance is that much below the one that is claimed.
    """
    configuration = stages.configuration
    world = World(stages, (1, _NUMEL), configuration.noise_multiplier, dense=True)
    noise, labels = [], []
    for process in (1, 2):
        if process == 2:
            world.start()
        for step in (1, 2):
            world.sums()
            noise.append(world.release()[0])
            labels.append(f"step {step} of process {process}")
    problems = []
    deviation = 1 / math.sqrt(_NUMEL)
    correlations = torch.corrcoef(torch.stack(noise))
    for i, j in itertools.combinations(range(len(noise)), 2):
        if not abs(float(correlations[i, j])) < _MOST_DEVIATIONS * deviation:
            problems.append(
                f"the noise of {labels[i]} and of {labels[j]} is correlated by "
                f"{float(correlations[i, j]):.2f}: their difference shows the data. Draw a new "
                "secret in every process, and never the same stream twice"
            )
    ranks = configuration.world_size if configuration.placement == "local" else 1
    claimed = ranks * (configuration.noise_multiplier * configuration.max_grad_norm) ** 2
    found = float(torch.stack(noise).double().square().mean())
    if found < claimed * (1 - _MOST_DEVIATIONS * math.sqrt(2 / (_NUMEL * len(noise)))):
        problems.append(
            f"the noise has {found / claimed:.2f} times the variance that is claimed for the "
            "sum over ranks"
        )
    return problems


def find_repeated_masks(stages: Stages) -> list[str]:
    """Compare who is drawn on every rank in each of two processes, with the same user seed.

    Returns:
        What is wrong, in words: pairs whose batches share more samples than q^2 explains, and ranks
        that draw more than q; with probability below 1e-9 if nothing is.
    """
    configuration = stages.configuration
    rate = configuration.sample_rate
    ranks = configuration.world_size
    masks, labels = [], []
    for process, rank in itertools.product((1, 2), range(ranks)):
        mask = torch.zeros(_BATCHES, _SAMPLES, dtype=torch.bool)
        for row, indices in zip(mask, draw(stages, rank, _SAMPLES, _BATCHES), strict=True):
            row[indices] = True
        masks.append(mask)
        labels.append(f"rank {rank} in process {process}" if ranks > 1 else f"process {process}")
    total = _BATCHES * _SAMPLES
    problems = []
    for mask, label in zip(masks, labels, strict=True):
        if binomial_tail(int(mask.sum()), total, rate) < _CHANCE:
            problems.append(
                f"{label} draws samples with probability {int(mask.sum()) / total:.3g}, not with "
                f"the sample_rate {rate:g} that is claimed"
            )
    if rate == 1:
        return problems
    pairs = []
    for (one, a), (other, b) in itertools.combinations(zip(labels, masks, strict=True), 2):
        shared = int((a & b).sum())
        if binomial_tail(shared, total, rate * rate) < _CHANCE:
            pairs.append((one, other, shared, int(a.sum())))
    if pairs:
        one, other, shared, drawn = pairs[0]
        more = f" (and {len(pairs) - 1} more pairs)" if len(pairs) > 1 else ""
        problems.append(
            f"{one} and {other}{more} draw the same samples: {shared} of {drawn} in common, where "
            f"{rate * rate * total:.0f} would be chance. Who sees one batch knows the other, and "
            "sampling protects nobody. Draw from a secret of each process"
        )
    return problems
