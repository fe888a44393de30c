"""The Renyi divergence of a step of the Poisson-sampled Gaussian mechanism."""

import functools
import math

import numpy as np
from numpy.typing import NDArray

_Array = NDArray[np.float64]

# Less noise counts as none, and more as this much: both overestimate the cost, and the squares stay
# in the range of float64.
_NO_NOISE, _MOST_NOISE = 1e-6, 1e6
# Below, the integral for fractional orders would need ever finer grids.
_INTEGRAL_FROM = 0.1
# More than rounding and the grid may take from the logarithm of a moment.
_ROUNDING = 1e-14


@functools.lru_cache(maxsize=256)
def renyi_divergences(
    noise_multiplier: float, sample_rate: float, orders: tuple[float, ...]
) -> _Array:
    """Return the Renyi divergence of one step at every order.

    With sigma the noise multiplier and q the sample rate, P = N(0, sigma^2) and
    Q = (1 - q) N(0, sigma^2) + q N(1, sigma^2):  D_a(Q || P) = log A(a) / (a - 1) with
    A(a) = E_{z ~ P} [(Q(z) / P(z))^a].  The opposite direction is never larger.  Mironov, Talwar &
    Zhang, "Renyi Differential Privacy of the Sampled Gaussian Mechanism", arXiv 1908.10530, 2019:

    1. whole orders: their closed form (section 3.3), written so that nothing cancels,
       A - 1 = sum_{k=2}^{a} binom(a, k) (1 - q)^(a-k) q^k (exp((k^2 - k) / (2 sigma^2)) - 1);
    2. fractional orders: the integral itself, by the trapezoidal rule on the whole line, whose
       error falls exponentially with the grid.  1e-14 is added to log A for it and for rounding;
    3. log A is convex in the order, so the chord between two whole orders bounds it from above, and
       so does a (a - 1) / (2 sigma^2), the step without sampling.  The smallest of the three is
       taken; for a sigma below 0.1, where epsilon is in the hundreds, the integral is left out.

    Everything is in logarithms, in float64.

    Args:
        noise_multiplier: sigma, positive; below 1e-6 no noise (infinity), above 1e6 as 1e6.
        sample_rate: q, from 0 to 1.
        orders: the orders a, all greater than 1.

    Returns:
        A float64 array with one divergence per order; read-only, because it is cached.

    Example::

        >>> from comm_hooks.optim.private.accounting.renyi import renyi_divergences
        >>> renyi_divergences(2.0, 1.0, (4.0, 16.0))
        array([0.5, 2. ])
    """
    alphas = np.array(orders)
    noise_multiplier = min(noise_multiplier, _MOST_NOISE)
    if sample_rate == 0:
        divergences = np.zeros(len(orders))
    elif noise_multiplier < _NO_NOISE:
        divergences = np.full(len(orders), math.inf)
    elif sample_rate == 1:
        divergences = alphas / (2 * noise_multiplier**2)
    else:
        divergences = _log_moments(noise_multiplier, sample_rate, alphas) / (alphas - 1)
    divergences.flags.writeable = False
    return divergences


def _log_moments(sigma: float, q: float, alphas: _Array) -> _Array:
    whole = alphas == np.floor(alphas)
    fractional = alphas[~whole]
    neighbours = np.arange(1, math.ceil(fractional.max(initial=1)) + 1)
    orders = sorted({*neighbours.tolist(), *alphas[whole].astype(int).tolist()})
    of_whole_orders = [_whole_order(sigma, q, order) for order in orders]
    # Exact at whole orders, chords between them.
    logs = np.interp(alphas, orders, of_whole_orders)
    logs = np.minimum(logs, alphas * (alphas - 1) / (2 * sigma**2))
    if len(fractional) and sigma >= _INTEGRAL_FROM:
        integrals = np.maximum(_fractional_orders(sigma, q, fractional), 0) + _ROUNDING
        logs[~whole] = np.minimum(logs[~whole], integrals)
    return logs


def _whole_order(sigma: float, q: float, alpha: int) -> float:
    k = np.arange(2, alpha + 1)
    if not len(k):
        return 0.0
    log_factorials = _log_factorials(alpha)
    log_binomials = log_factorials[alpha] - log_factorials[k] - log_factorials[alpha - k]
    exponents = k * (k - 1) / (2 * sigma**2)
    # log(exp(x) - 1), for large x as well as for small.
    log_growth = exponents + np.log(-np.expm1(-exponents))
    terms = log_binomials + (alpha - k) * math.log1p(-q) + k * math.log(q) + log_growth
    return float(np.logaddexp(0, np.logaddexp.reduce(terms)))


@functools.lru_cache(maxsize=1024)
def _log_factorials(largest: int) -> _Array:
    return np.array([math.lgamma(k + 1) for k in range(largest + 1)])


def _fractional_orders(sigma: float, q: float, alphas: _Array) -> _Array:
    # The integrand is P's density around 0, and a copy around a for what is left of q^a; both have
    # decayed by exp(-72) within 12 sigma.  It is analytic up to a distance of pi sigma^2 from the
    # real line, hence the second bound of the grid.
    step = min(sigma / 8, sigma**2 / 2)
    z = np.arange(-12 * sigma, alphas.max() + 12 * sigma + step, step)
    log_ratio = np.logaddexp(math.log1p(-q), math.log(q) + (2 * z - 1) / (2 * sigma**2))
    log_density = -(z**2) / (2 * sigma**2) - math.log(sigma * math.sqrt(2 * math.pi))
    integrands = log_density + alphas[:, None] * log_ratio
    return np.logaddexp.reduce(integrands, axis=1) + math.log(step)
