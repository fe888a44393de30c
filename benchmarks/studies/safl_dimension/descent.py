"""The rounds that take the loss of a quadratic down.

All clients have the same Hessian, and sketches are linear: the mean of their sketches is the sketch
of the mean gradient, whatever their number, so one of them stands for all.
"""

from collections.abc import Callable

from torch import nn

from benchmarks.lab.outcomes import Advance, Diverged
from benchmarks.lab.runs import Point
from benchmarks.lab.training import NamedParameters, Steps
from benchmarks.studies.quadratics import Quadratic
from comm_hooks.collectives import Simulated, Transport

Build = Callable[[NamedParameters, Transport, float, int], Steps]
"""Makes what takes a method's steps, with a learning rate and a seed."""

_EXPLODED = 1e3


def descend(
    quadratic: Quadratic,
    build: Build,
    lr: float,
    seed: int,
    *,
    limit: int,
    target: float,
    advance: Advance,
) -> list[Point]:
    """Train, one step per round, until the loss has fallen far enough; return the curve.

    Points are rounds 1, 2, 4, ... and the last one. The error of a point is the loss over the
    initial one. The loss of a point is the cost that tuning minimizes: the rounds until
    ``target``, or beyond ``limit`` by the loss that is left.

    Args:
        quadratic: the loss.
        build: makes the method.
        lr: its learning rate.
        seed: of its random numbers.
        limit: the most rounds.
        target: the share of the initial loss at which to stop.
        advance: called after each round.

    Raises:
        Diverged: with the points so far, if the loss explodes.
    """
    weight = nn.Parameter(quadratic.start[None].clone())
    steps = build([("weight", weight)], Simulated(1)[0], lr, seed)
    initial = quadratic.loss(quadratic.start)
    left = 1.0
    curve: list[Point] = []

    def closure() -> float:
        weight.grad = quadratic.gradient(weight.detach()[0])[None]
        return left

    for round_ in range(1, limit + 1):
        steps.step(closure)
        advance()
        left = quadratic.loss(weight.detach()[0]) / initial
        if not left < _EXPLODED:
            raise Diverged(*curve)
        is_power_of_two = round_ & (round_ - 1) == 0
        if left <= target or round_ == limit or is_power_of_two:
            cost = round_ if left <= target else limit * (1 + left)
            curve.append(Point(round_, cost, left, 0))
        if left <= target:
            break
    return curve
