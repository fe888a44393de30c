"""Quadratics with a known spectrum, and the rounds that take their loss down.

The loss is x^T H x / 2 with H = D U diag(lambda) U D: U is the Hadamard transform and D a diagonal
of random signs, so that eigenvectors lie along no coordinate, which an adaptive server would see.
It starts where every eigenvector has a coefficient of +-1, so the initial loss is the trace over 2,
whatever the seed.

Theorem 3.2 of SAFL (Chen, Li & Banerjee) has the intrinsic dimension, sum |lambda| / max |lambda|,
where others have the number d of parameters.  For equal eigenvalues that is d; for lambda_i =
i^-1.5 it stays below 2.62.

All clients have the same H, and sketches are linear: the mean of their sketches is the sketch of
the mean gradient, whatever their number, so one of them stands for all.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import nn

from comm_hooks.collectives import Simulated, Transport
from comm_hooks.kernels.hadamard import hadamard
from comm_hooks.launchers.lab.simulated import NamedParameters, Steps

Build = Callable[[NamedParameters, Transport, float, int], Steps]
"""Makes what takes a method's steps, with a learning rate and a seed."""

_EXPLODED = 1e3

SPECTRA: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "flat": torch.ones_like,
    "power law": lambda i: i**-1.5,
}
"""The eigenvalues by their number, 1, 2, ..."""


@dataclass(frozen=True)
class Quadratic:
    """A quadratic loss.

    Args:
        eigenvalues: of the Hessian, (d,), d being a power of 2.
        signs: D, (d,).
        start: where training starts, (d,).
    """

    eigenvalues: torch.Tensor
    signs: torch.Tensor
    start: torch.Tensor

    @property
    def intrinsic_dimension(self) -> float:
        """The sum of the eigenvalues over the largest."""
        return float(self.eigenvalues.sum() / self.eigenvalues.max())

    def coefficients(self, x: torch.Tensor) -> torch.Tensor:
        """Return those of a vector in the basis of eigenvectors."""
        return hadamard((self.signs * x)[None])[0]

    def loss(self, x: torch.Tensor) -> float:
        """Return the loss at a point."""
        return float((self.eigenvalues * self.coefficients(x).square()).sum() / 2)

    def gradient(self, x: torch.Tensor) -> torch.Tensor:
        """Return the gradient at a point."""
        return self.signs * hadamard((self.eigenvalues * self.coefficients(x))[None])[0]


def make_quadratic(spectrum: str, numel: int, seed: int) -> Quadratic:
    """Return a quadratic of ``numel`` parameters, a power of 2, with a key of ``SPECTRA``."""
    generator = torch.Generator().manual_seed(seed)
    signs, coefficients = torch.randint(0, 2, (2, numel), generator=generator) * 2.0 - 1
    eigenvalues = SPECTRA[spectrum](torch.arange(1.0, numel + 1))
    return Quadratic(eigenvalues, signs, signs * hadamard(coefficients[None])[0])


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
