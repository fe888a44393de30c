"""Auditing any training in one run: put canaries in by coins, look at the result, guess."""

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch

from benchmarks.audit.attacks.bounds import epsilon_lower_bound

# How many of m canaries to guess, half of them as present.  Few guesses are surer, many prove more.
_SHARES_GUESSED = (1 / 16, 1 / 4)

Train = Callable[[torch.Tensor], torch.Tensor]


@dataclass(frozen=True)
class OneRunAudit:
    """What one run proved.

    Attributes:
        epsilon: the lower bound.
        correct: how many guesses were right, in the test that proved most.
        guesses: how many were made in it.
        canaries: how many there were.
    """

    epsilon: float
    correct: int
    guesses: int
    canaries: int


def audit_one_run(
    train: Train, canaries: int, *, delta: float, confidence: float = 0.95
) -> OneRunAudit:
    """Return a lower bound of the epsilon of a training, from one run of it.

    1. a fair coin for each canary decides whether it is in the dataset;
    2. ``train`` trains with those that are, and scores each canary by what was released: the
       higher, the more it looks as if it had been in;
    3. the canaries with the highest scores are guessed to be in, those with the lowest to be out,
       1/32 and 1/8 of them on each side;
    4. the bound is the best of those that
       :func:`~benchmarks.audit.epsilon_lower_bound` gives, each at a confidence with
       which all hold together.

    Args:
        train: ``train(included)`` takes a bool tensor ``(canaries,)`` and returns scores, ``(m,)``
            or, of several ways to score, ``(ways, m)``.  It must not use ``included`` for anything
            else than to choose the data.
        canaries: m; at least 32.  A hundred right guesses prove an epsilon of 3 or so, no more.
        delta: of the guarantee that is tested; well below 1 / m.
        confidence: the probability with which the bound holds.

    Raises:
        ValueError: for too few canaries, and scores that do not fit.

    Source: Steinke, Nasr and Jagielski, "Privacy Auditing with One (1) Training Run", NeurIPS 2023,
    Algorithm 1.

    Example::

        >>> import torch
        >>> from benchmarks.audit import audit_one_run
        >>> def train(included):  # releases everything
        ...     return included.float()
        >>> audit_one_run(train, 512, delta=1e-6).epsilon > 3
        True
    """
    fewest = math.ceil(2 / min(_SHARES_GUESSED))
    if canaries < fewest:
        raise ValueError(f"canaries must be at least {fewest}, got {canaries}")
    included = fair_coins(canaries)
    scores = train(included.clone())
    if scores.shape[-1:] != (canaries,) or scores.dim() > 2:
        raise ValueError(
            f"train must return scores of shape ({canaries},) or (ways, {canaries}), got "
            f"{tuple(scores.shape)}"
        )
    return guess(scores, included, delta=delta, confidence=confidence)


def guess(
    scores: torch.Tensor, included: torch.Tensor, *, delta: float, confidence: float
) -> OneRunAudit:
    """Do steps 3 and 4 of :func:`audit_one_run`."""
    canaries = len(included)
    ways = scores.reshape(-1, canaries)
    tests = len(ways) * len(_SHARES_GUESSED)
    best: OneRunAudit | None = None
    for way in ways:
        # Equal scores in the order of canaries would be guesses about the order.
        shuffled = torch.from_numpy(np.random.default_rng().permutation(canaries))
        order = shuffled[way[shuffled].argsort()]
        for share in _SHARES_GUESSED:
            half = max(1, round(canaries * share / 2))
            correct = int((~included[order[:half]]).sum() + included[order[-half:]].sum())
            bound = epsilon_lower_bound(
                correct, 2 * half, canaries, delta, 1 - (1 - confidence) / tests
            )
            audit = OneRunAudit(bound, correct, 2 * half, canaries)
            if best is None or audit.epsilon > best.epsilon:
                best = audit
    assert best
    return best


def fair_coins(canaries: int) -> torch.Tensor:
    """Return who is in, bool: drawn apart from PyTorch's generators, which training may seed."""
    return torch.from_numpy(np.random.default_rng().random(canaries) < 0.5)
