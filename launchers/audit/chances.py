"""How surely a check must know: the budget of false alarms, and tails of known distributions.

A correct training raises an alarm in one audit of 1,000 or less: every test has its share of that,
here, and divides it by the number of comparisons it makes.
"""

import math
from statistics import NormalDist

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[np.float64]

MOST_FALSE_ALARMS = 1e-3
SHARES = {
    "releases: bound": 1e-4,
    "training: bound": 1.5e-4,
    "noise: energy": 1e-4,
    "noise: correlation": 5e-5,
    "noise: dimension": 2e-5,
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
    "sampling: pairs": 5e-5,
    "sampling: lags": 5e-5,
    "sampling: samples": 5e-5,
    "sampling: shifts": 2e-5,
    "sampling: seeds": 1e-5,
}


def chance(test: str, comparisons: int = 1) -> float:
    """Return the probability with which one comparison of a test may be wrong."""
    return SHARES[test] / max(1, comparisons)


def normal_limit(chance: float) -> float:
    """Return what a standard normal variable exceeds, on either side, with this probability."""
    return -NormalDist().inv_cdf(chance / 2)


def smallest_energy(terms: int, chance: float) -> float:
    """Return below which the mean square of so many standard normal variables is by chance.

    Chernoff's bound: P[mean < c] <= (c e^(1 - c))^(terms / 2) for c < 1.

    Example::

        >>> from comm_hooks.launchers.audit.chances import smallest_energy
        >>> round(smallest_energy(1000, 1e-6), 2)
        0.78
    """
    wanted = 2 * math.log(chance) / terms
    # log c + 1 - c rises from minus infinity to 0.
    low, high = wanted - 1, 0.0
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if middle + 1 - math.exp(middle) < wanted else (low, middle)
    return math.exp(low)


def largest_correlation(length: int, chance: float) -> float:
    """Return what two independent normal vectors' cosine exceeds, on either side, by chance.

    Its square has a beta distribution: P[|cosine| > r] <= 2 (1 - r^2)^((length - 1) / 2).

    Example::

        >>> from comm_hooks.launchers.audit.chances import largest_correlation
        >>> round(largest_correlation(10_000, 1e-9), 3)
        0.065
    """
    return math.sqrt(-math.expm1(2 * math.log(chance / 2) / max(1, length - 1)))


def log_tail(counts: npt.ArrayLike, trials: npt.ArrayLike, rate: npt.ArrayLike) -> Array:
    """Return a bound on the logarithm of a binomial count's tail, on the side where it lies.

    Chernoff's: P[X >= k] <= exp(-n KL(k / n, p)), and so below.

    Example::

        >>> from comm_hooks.launchers.audit.chances import log_tail
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


def too_many(counts: npt.ArrayLike, trials: npt.ArrayLike, rate: float, chance: float) -> bool:
    """Return whether any of some binomial counts is larger than chance explains."""
    over = np.asarray(counts) > np.asarray(trials) * rate
    return bool((over & (log_tail(counts, trials, rate) < math.log(chance))).any())
