"""Exact discrete Gaussian noise, with which the low bits of a sum reveal nothing."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from comm_hooks.optim.private.noise.gaussian import Values, on_pieces_
from comm_hooks.optim.private.noise.secret import Stream

Integers = npt.NDArray[np.int64]

# The largest relative increase of C by rounding to the grid, and of the noise by rounding s up.
_SLACK = 2.0**-11
# 2 s^2 must fit into 63 bits, also where s is rounded up.
_LARGEST_SCALE = 2.0**30


@dataclass(frozen=True)
class Grid:
    """The multiples of a power of two to which sums are rounded, and the scale of noise on them.

    Attributes:
        spacing: g, the power of two.
        scale: s; the noise is g times the discrete Gaussian N_Z(0, s^2), of variance <= (g s)^2.
    """

    spacing: float
    scale: int

    @classmethod
    def of(cls, noise_multiplier: float, sensitivity: float, elements: int) -> "Grid":
        r"""Return the grid for sums of ``elements`` numbers, with sensitivity C and noise sigma C.

        Rounding to multiples of g moves each element of two neighbouring sums by g / 2 at most, so
        they then differ by at most C + sqrt(elements) g, and s is sigma (C + sqrt(elements) g) / g,
        rounded up.  (Kairouz, Liu & Steinke, ICML 2021, round each sample's vector once: their
        second term is sqrt(elements) g / 2.)

        Accountants' figures for sigma hold: between a discrete Gaussian and one moved by a vector
        of the grid, Renyi divergences are those of the Gaussian, with sampling exactly for whole
        orders and else to a relative exp(-2 pi^2 s^2), which is negligible for s > 1000.
        """
        root = math.sqrt(elements)
        std = noise_multiplier * sensitivity
        coarsest = max(min(sensitivity / root, std) * _SLACK, 2 * std / _LARGEST_SCALE)
        spacing = 2.0 ** math.floor(math.log2(coarsest))
        scale = math.ceil(noise_multiplier * (sensitivity + root * spacing) / spacing)
        return cls(spacing, scale)

    @property
    def std(self) -> float:
        """The bound g s of the noise's standard deviation."""
        return self.spacing * self.scale


def add_discrete_noise_(tensors: Sequence[torch.Tensor], grid: Grid, stream: Stream) -> None:
    """Round every element to the grid and add independent noise on the grid, in place.

    The sum on the grid is exact in float64, up to 2^53 spacings; rounding it to the tensor's type
    afterwards is post-processing.
    """

    def add(values: Values, generator: np.random.Generator) -> None:
        # A power of two divides without rounding.
        on_grid = np.rint(values / np.float64(grid.spacing))
        on_grid += discrete_gaussian(values.size, grid.scale, generator)
        on_grid *= grid.spacing
        values[:] = on_grid

    on_pieces_(tensors, add, stream)


def discrete_gaussian(count: int, scale: int, generator: np.random.Generator) -> Integers:
    """Return ``count`` integers y, of probability proportional to exp(-y^2 / (2 scale^2)) exactly.

    Canonne, Kamath & Steinke, NeurIPS 2020, Algorithms 1 to 3, on whole arrays, with t = scale:
    a discrete Laplace variable of scale t is taken with probability
    exp(-(\\|y\\| - t)^2 / (2 t^2)).  Everything random is a uniform integer below a bound, without
    bias; there are no floating-point numbers.
    """
    found, missing = [], count
    while missing > 0:
        drawn = _accepted(_discrete_laplace(2 * missing + 8, scale, generator), scale, generator)
        found.append(drawn[:missing])
        missing -= len(found[-1])
    return np.concatenate(found) if found else np.empty(0, np.int64)


def _discrete_laplace(candidates: int, scale: int, generator: np.random.Generator) -> Integers:
    """Return up to ``candidates`` integers y, of probability proportional to exp(-|y| / scale)."""
    low = generator.integers(0, scale, candidates)
    low = low[_happens(low, scale, generator)]
    high = np.zeros_like(low)
    going = np.arange(low.size)
    while going.size:
        going = going[_happens(np.ones(going.size, np.int64), 1, generator)]
        high[going] += 1
    size = low + scale * high
    is_negative = generator.integers(0, 2, size.size) == 1
    # Zero has one sign only.
    kept = ~(is_negative & (size == 0))
    return np.where(is_negative, -size, size)[kept]


def _accepted(laplace: Integers, scale: int, generator: np.random.Generator) -> Integers:
    """Return each y of ``laplace`` with probability exp(-a^2 / (2 scale^2)), a = ||y| - scale|.

    With a = k scale + r the exponent is k^2 / 2 + k r / scale + r^2 / (2 scale^2), and each of
    these terms, k^2 of the first and k of the second kind, is an event of its own.
    """
    whole, rest = np.divmod(np.abs(np.abs(laplace) - scale), scale)
    taken = _happens(rest**2, 2 * scale**2, generator)
    for times, numerators, denominator in ((whole**2, np.ones_like(rest), 2), (whole, rest, scale)):
        left = np.flatnonzero(taken & (times > 0))
        done = 0
        while left.size:
            happens = _happens(numerators[left], denominator, generator)
            taken[left[~happens]] = False
            done += 1
            left = left[happens & (times[left] > done)]
    return laplace[taken]


def _happens(
    numerators: Integers, denominator: int, generator: np.random.Generator
) -> npt.NDArray[np.bool_]:
    """Draw an event of probability exp(-x) for each x = numerator / denominator <= 1.

    Of independent events of probability x / 1, x / 2, x / 3, ... the first that does not happen
    has an odd number with probability exp(-x) (von Neumann).
    """
    happens = np.empty(numerators.size, np.bool_)
    left = np.arange(numerators.size)
    number = 1
    while left.size:
        goes_on = generator.integers(0, denominator, left.size) < numerators[left]
        if number > 1:  # x / k is both of x and 1 / k
            goes_on &= generator.integers(0, number, left.size) == 0
        happens[left[~goes_on]] = number % 2 == 1
        left = left[goes_on]
        number += 1
    return happens
