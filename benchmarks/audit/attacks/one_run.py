"""An audit of any training in one run: insert canaries by coins, look at the result, guess."""

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch

from benchmarks.audit.attacks.bounds import epsilon_lower_bound

# Shares of the canaries to guess, half of them as present.  Few guesses are surer, many prove more.
_SHARES_GUESSED = (1 / 16, 1 / 4)


@dataclass(frozen=True)
class OneRunAudit:
    """The result of one run.

    Attributes:
        epsilon: the lower bound.
        correct: the correct guesses of the test that proved most.
        guesses: its number of guesses.
        canaries: the number of canaries.
    """

    epsilon: float
    correct: int
    guesses: int
    canaries: int


def audit_one_run(
    train: Callable[[torch.Tensor], torch.Tensor],
    canaries: int,
    *,
    delta: float,
    confidence: float = 0.95,
) -> OneRunAudit:
    """Return a lower bound of the epsilon of a training, from one run of it.

    1. a fair coin for each canary decides whether it is in the dataset;
    2. ``train`` trains with those, and scores each canary by the released model: a higher score
       for a canary that seems to have been in;
    3. guess the canaries with the highest scores to be in and those with the lowest to be out,
       1/32 and 1/8 of them on each side;
    4. the bound is the best of those of :func:`~benchmarks.audit.epsilon_lower_bound`, each at a
       confidence with which all hold together.

    Args:
        train: ``train(included)`` takes a bool tensor ``(canaries,)`` and returns scores, ``(m,)``
            or, for several ways to score, ``(ways, m)``.  It must use ``included`` only to choose
            the data.
        canaries: m; at least 32.  A hundred correct guesses prove an epsilon of about 3.
        delta: of the guarantee; well below 1 / m.
        confidence: the probability with which the bound holds.

    Raises:
        ValueError: for too few canaries, and for scores of another shape.

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
    ways = scores.reshape(-1, canaries)
    each = 1 - (1 - confidence) / (len(ways) * len(_SHARES_GUESSED))
    audits = []
    for way in ways:
        # Equal scores in the order of the canaries would make guesses about that order.
        shuffled = torch.from_numpy(np.random.default_rng().permutation(canaries))
        order = shuffled[way[shuffled].argsort()]
        for share in _SHARES_GUESSED:
            half = max(1, round(canaries * share / 2))
            correct = int((~included[order[:half]]).sum() + included[order[-half:]].sum())
            bound = epsilon_lower_bound(correct, 2 * half, canaries, delta, each)
            audits.append(OneRunAudit(bound, correct, 2 * half, canaries))
    return max(audits, key=lambda audit: audit.epsilon)


def fair_coins(canaries: int) -> torch.Tensor:
    """Return fair coins, bool, from another generator than PyTorch's, which training may seed."""
    return torch.from_numpy(np.random.default_rng().random(canaries) < 0.5)
