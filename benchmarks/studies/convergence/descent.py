"""Squared gradients on the way down a quadratic, from noisy gradients.

The minimum is shifted by a vector of +-1, since layerwise methods take steps as long as their
parameters, which would shrink by themselves on the way to zero.
"""

import math
import statistics
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import nn

from benchmarks.lab.outcomes import Advance, Diverged
from benchmarks.lab.runs import Point
from benchmarks.studies.quadratics import make_quadratic

_EXPLODED = 1e6
_SIDE = 32  # rows of the parameter: methods leave vectors uncompressed


class Stepping(Protocol):
    """What trains: the clients whose turn it is in a step, and a step from ``p.grad``."""

    def clients(self) -> Iterable[int]:
        """Return the clients of the next round, each of which calls ``step``."""

    def step(self) -> object:
        """Take a client's step."""


Build = Callable[[list[tuple[str, nn.Parameter]], float, int], Stepping]
"""Makes what trains: of named parameters, a learning rate and a seed."""


@dataclass(frozen=True)
class Problem:
    """What is minimized.

    Args:
        spectrum: a key of ``benchmarks.studies.quadratics.SPECTRA``.
        numel: parameters, a power of 2, at least 32.
        noise: standard deviation of the noise of each element of a client's gradient.
    """

    spectrum: str
    numel: int
    noise: float


def squared_gradients(
    problem: Problem, build: Build, *, scale: float, steps: int, seed: int, advance: Advance
) -> Point:
    """Descend; return the mean squared gradient as a loss, the largest over the first as an error.

    Gradients are the exact ones at the beginnings of all rounds.

    Args:
        problem: the loss and its noise.
        build: makes the method.
        scale: c, of a learning rate of c / sqrt(steps).
        steps: rounds, T.
        seed: of basis, start, noise and method.
        advance: called after each round.

    Raises:
        Diverged: without points, if a gradient explodes.
    """
    quadratic = make_quadratic(problem.spectrum, problem.numel, seed)
    generator = torch.Generator().manual_seed(seed)
    minimum = torch.randint(0, 2, (problem.numel,), generator=generator) * 2.0 - 1
    weight = nn.Parameter((minimum + quadratic.start).view(_SIDE, -1).clone())
    method = build([("weight", weight)], scale / math.sqrt(steps), seed)
    lengths: list[float] = []
    for _ in range(steps):
        for turn, _ in enumerate(method.clients()):
            exact = quadratic.gradient(weight.detach().flatten() - minimum)
            if turn == 0:
                lengths.append(float(exact.square().sum()))
                if not lengths[-1] < _EXPLODED:
                    raise Diverged
            noise = problem.noise * torch.randn(problem.numel, generator=generator)
            weight.grad = (exact + noise).view_as(weight)
            method.step()
        advance()
    return Point(steps, statistics.mean(lengths), max(lengths) / lengths[0], 0)
