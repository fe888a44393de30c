"""The budget of false alarms, and the tails of known distributions.

A correct training raises an alarm in one audit of 1,000 or less: each test has its share of that,
and divides it by the number of its comparisons.
"""

import math
from typing import Any

import numpy as np
import numpy.typing as npt
from scipy.stats import beta, chi2, norm

Array = npt.NDArray[np.float64]

MOST_FALSE_ALARMS = 1e-3
SHARES = {
    "releases: bound": 1e-4,
    "noise: energy": 1e-4,
    "noise: correlation": 5e-5,
    "noise: lags": 5e-5,
    "noise: shape": 5e-5,
    "noise: data": 2e-5,
    "noise: seeds": 1e-5,
    "noise: reported variance": 1e-5,
    "messages: energy": 2e-5,
    "messages: correlation": 2e-5,
    "compressed: energy": 5e-5,
    "sampling: rate": 1e-4,
    "sampling: sizes": 5e-5,
    "sampling: lags": 5e-5,
    "sampling: shifts": 2e-5,
    "sampling: seeds": 1e-5,
}


def chance(test: str, comparisons: int = 1) -> float:
    """Return the probability with which one comparison of a test may be wrong."""
    return SHARES[test] / max(1, comparisons)


def normal_limit(chance: float) -> float:
    """Return the size that a standard normal variable exceeds with this probability."""
    return float(norm.isf(chance / 2))


def smallest_energy(terms: int, chance: float) -> float:
    """Return the limit below which the mean square of standard normal variables lies by chance.

    Example::

        >>> from benchmarks.audit.checks.chances import smallest_energy
        >>> round(smallest_energy(1000, 1e-6), 2)
        0.8
    """
    return float(chi2.ppf(chance, terms) / terms)


def largest_correlation(length: int, chance: float) -> float:
    """Return the size that the cosine of two independent normal vectors exceeds by chance.

    Its square has a beta distribution of 1/2 and (length - 1) / 2.

    Example::

        >>> from benchmarks.audit.checks.chances import largest_correlation
        >>> round(largest_correlation(10_000, 1e-9), 3)
        0.061
    """
    return math.sqrt(beta.isf(chance, 0.5, max(1, length - 1) / 2))


def log_tail(counts: npt.ArrayLike, trials: npt.ArrayLike, rate: npt.ArrayLike) -> Array:
    """Return a bound on the logarithm of a binomial count's tail, on its own side of the mean.

    Chernoff's: P[X >= k] <= exp(-n KL(k / n, p)), and so below.

    Example::

        >>> from benchmarks.audit.checks.chances import log_tail
        >>> round(float(log_tail(70, 100, 0.5)), 2)
        -8.23
    """
    n = np.asarray(trials, dtype=np.float64)
    found = np.asarray(counts, dtype=np.float64) / n
    p = np.asarray(rate, dtype=np.float64)
    with np.errstate(divide="ignore", invalid="ignore"):
        present = np.where(found > 0, found * np.log(found / p), 0.0)
        absent = np.where(found < 1, (1 - found) * np.log((1 - found) / (1 - p)), 0.0)
    bound: Array = -n * np.nan_to_num(present + absent, nan=0.0)
    return bound


def strongest_lag(
    one: npt.NDArray[Any],
    other: npt.NDArray[Any],
    least: float,
    chance: float,
    *,
    forward: bool = False,
) -> tuple[int, float] | None:
    """Correlate the rows of two matrices (rows, d) of mean 0 and variance 1 at every shift.

    Args:
        least: the fewest products of a shift that is looked at.
        chance: the probability with which any of the shifts may be reported by mistake.
        forward: whether to look at positive shifts only.

    Returns:
        The shift from 1 - d to d - 1 at which the sum over rows and i of
        ``one[:, i] * other[:, i + shift]`` is farthest from 0, and its distance in standard
        deviations; None where that is chance.

    Example::

        >>> rows = np.random.default_rng(0).standard_normal((50, 100))
        >>> strongest_lag(rows, np.roll(rows, 3, axis=1), 500, 1e-6)[0]
        3
    """
    numel = one.shape[1]
    size = 1 << (2 * numel - 1).bit_length()
    spectrum = np.fft.rfft(one, n=size)
    products = spectrum.conj() * (spectrum if other is one else np.fft.rfft(other, n=size))
    shifts = np.arange(1 - numel, numel)
    terms = len(one) * (numel - np.abs(shifts))
    usable = (terms >= least) & ((shifts > 0) | (not forward))
    deviations = np.fft.irfft(products.sum(0), n=size)[shifts] / np.sqrt(terms)
    worst = int(np.where(usable, np.abs(deviations), 0.0).argmax())
    # Sums of rare events have longer tails than normal variables.
    limit = 1.15 * normal_limit(chance / max(1, int(usable.sum())))
    found = float(deviations[worst])
    return (int(shifts[worst]), found) if usable[worst] and abs(found) > limit else None
