"""The rounds that take the loss of a quadratic down.

All clients have the same Hessian, and sketches are linear: the mean of their sketches is the sketch
of the mean gradient, whatever their number, so one of them stands for all.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass

from torch import nn

from benchmarks.lab.training import NamedParameters, Steps
from benchmarks.studies.quadratics import Quadratic
from comm_hooks.collectives import Simulated, Transport

Build = Callable[[NamedParameters, Transport, float, int], Steps]
"""Makes what takes a method's steps, with a learning rate and a seed."""

_EXPLODED = 1e3


@dataclass(frozen=True)
class Descent:
    """How a training went.

    Args:
        lr: its learning rate.
        seed: of basis, start and sketches.
        rounds: until the loss was down to ``target`` of the initial one; None if it never was.
        left: the loss at the end over the initial one; None if it diverged.
    """

    lr: float
    seed: int
    rounds: int | None
    left: float | None

    def cost(self, limit: int) -> float:
        """Return what a search makes small: rounds, or beyond ``limit`` by how much is left."""
        if self.left is None:
            return math.inf
        return limit * (1 + self.left) if self.rounds is None else self.rounds


def descend(
    quadratic: Quadratic,
    build: Build,
    lr: float,
    seed: int,
    *,
    limit: int,
    target: float,
    advance: Callable[[], None],
) -> Descent:
    """Train, one step per round, until the loss has fallen far enough.

    Args:
        quadratic: what is minimized.
        build: makes the method.
        lr: its learning rate.
        seed: of what it draws.
        limit: the most rounds.
        target: the share of the initial loss at which to stop.
        advance: called after each round.
    """
    weight = nn.Parameter(quadratic.start[None].clone())
    steps = build([("weight", weight)], Simulated(1)[0], lr, seed)
    initial = quadratic.loss(quadratic.start)
    left = 1.0

    def closure() -> float:
        weight.grad = quadratic.gradient(weight.detach()[0])[None]
        return left

    for round_ in range(1, limit + 1):
        steps.step(closure)
        advance()
        left = quadratic.loss(weight.detach()[0]) / initial
        if left <= target:
            return Descent(lr, seed, round_, left)
        if not left < _EXPLODED:
            return Descent(lr, seed, None, None)
    return Descent(lr, seed, None, left)
