"""A spectrum from products with vectors: stochastic Lanczos quadrature.

Golub & Welsch, 1969; for networks' Hessians Ghorbani, Krishnan & Xiao, ICML 2019.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

Product = Callable[[Tensor], Tensor]
"""Returns H v of a vector (d,)."""


@dataclass(frozen=True)
class Spectrum:
    """An estimate of the eigenvalues' distribution.

    Args:
        numel: d, how many there are.
        nodes: estimated eigenvalues, (probes, steps).
        weights: the share of all eigenvalues at each, (probes, steps); rows sum to 1.
    """

    numel: int
    nodes: Tensor
    weights: Tensor

    @property
    def largest(self) -> float:
        """The largest eigenvalue."""
        return float(self.nodes.max())

    @property
    def smallest(self) -> float:
        """The smallest, which may be negative."""
        return float(self.nodes.min())

    @property
    def absolute_sum(self) -> float:
        """The sum of the eigenvalues' absolute values."""
        return self.numel * float((self.weights * self.nodes.abs()).sum(1).mean())

    @property
    def standard_error(self) -> float:
        """Of that sum, from what differs between probes, at least two."""
        sums = self.numel * (self.weights * self.nodes.abs()).sum(1)
        return float(sums.std() / len(sums) ** 0.5)

    @property
    def intrinsic_dimension(self) -> float:
        """Definition 3.1 of SAFL: the sum of absolute values over the largest of them."""
        return self.absolute_sum / max(abs(self.smallest), abs(self.largest))

    def share_within(self, fraction: float) -> float:
        """Return the share of the eigenvalues within this fraction of the largest, around 0."""
        limit = fraction * max(abs(self.smallest), abs(self.largest))
        return float((self.weights * (self.nodes.abs() <= limit)).sum(1).mean())


def spectrum(product: Product, numel: int, *, steps: int, probes: int, seed: int) -> Spectrum:
    """Estimate the spectrum of a symmetric matrix.

    For each of ``probes`` random vectors of signs:

    1. Lanczos's iteration, with full orthogonalization, gives an orthonormal basis of the Krylov
       space and the matrix's tridiagonal form T in it;
    2. the eigenvalues of T are nodes, the squared first components of its eigenvectors weights.

    Args:
        product: with the matrix.
        numel: its rows.
        steps: of the iteration, at most ``numel``.
        probes: how many vectors the weights are averaged over.
        seed: of these.
    """
    generator = torch.Generator().manual_seed(seed)
    found = []
    for _ in range(probes):
        start = torch.randint(0, 2, (numel,), generator=generator) * 2.0 - 1
        found.append(_quadrature(product, start / numel**0.5, min(steps, numel)))
    width = min(len(nodes) for nodes, _ in found)
    if any(len(nodes) != width for nodes, _ in found):
        found = [_padded(*each, steps) for each in found]
    return Spectrum(
        numel, torch.stack([nodes for nodes, _ in found]), torch.stack([w for _, w in found])
    )


def _quadrature(product: Product, vector: Tensor, steps: int) -> tuple[Tensor, Tensor]:
    basis = [vector]
    diagonal: list[float] = []
    beside: list[float] = []
    for _ in range(steps):
        new = product(basis[-1])
        diagonal.append(float(new @ basis[-1]))
        known = torch.stack(basis)
        # Twice: once leaves what rounding brought back (Kahan and Parlett).
        for _ in range(2):
            new = new - known.T @ (known @ new)
        length = float(new.norm())
        if length < 1e-6 * max(map(abs, diagonal)) or len(diagonal) == steps:
            break
        beside.append(length)
        basis.append(new / length)
    off = torch.tensor(beside, dtype=torch.float64)
    tridiagonal = torch.diag(torch.tensor(diagonal, dtype=torch.float64))
    tridiagonal += torch.diag(off, 1) + torch.diag(off, -1)
    nodes, vectors = torch.linalg.eigh(tridiagonal)
    return nodes, vectors[0].square()


def _padded(nodes: Tensor, weights: Tensor, steps: int) -> tuple[Tensor, Tensor]:
    """Fill up what ended early with nodes of no weight."""
    missing = steps - len(nodes)
    return torch.cat([nodes, nodes[:1].expand(missing)]), torch.cat([weights, torch.zeros(missing)])


def hessian_product(loss: Callable[[], Tensor], parameters: Sequence[nn.Parameter]) -> Product:
    """Return what multiplies with the Hessian of a loss, by differentiating its gradient."""

    def product(vector: Tensor) -> Tensor:
        pieces = vector.split([p.numel() for p in parameters])
        directions = [piece.view_as(p) for piece, p in zip(pieces, parameters, strict=True)]
        # Fused attention has no second derivative.
        with sdpa_kernel(SDPBackend.MATH):
            gradients = torch.autograd.grad(loss(), parameters, create_graph=True)
            slope = torch.stack(
                [(g * v).sum() for g, v in zip(gradients, directions, strict=True)]
            ).sum()
            products = torch.autograd.grad(slope, parameters, materialize_grads=True)
        return torch.cat([p.flatten() for p in products])

    return product
