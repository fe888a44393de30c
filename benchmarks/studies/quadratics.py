"""Quadratics with a known spectrum.

The loss is x^T H x / 2 with H = D U diag(lambda) U D: U is the Hadamard transform and D a diagonal
of random signs, so that eigenvectors lie along no coordinate, which adaptive methods would see.
It starts where every eigenvector has a coefficient of +-1, so the initial loss is the trace over 2,
whatever the seed.

Theorem 3.2 of SAFL (Chen, Li & Banerjee) has the intrinsic dimension, sum |lambda| / max |lambda|,
where others have the number d of parameters.  For equal eigenvalues that is d; for lambda_i =
i^-1.5 it stays below 2.62.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch

from comm_hooks.kernels.hadamard import hadamard

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
