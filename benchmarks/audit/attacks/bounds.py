"""Lower bounds of epsilon, from correct guesses, whatever made them."""

import math
from collections.abc import Callable

import numpy as np
from scipy.optimize import brentq
from scipy.special import expit
from scipy.stats import beta, binom, norm

_MOST_EPSILON = 100.0


def epsilon_lower_bound(
    correct: int, guesses: int, canaries: int, delta: float, confidence: float = 0.95
) -> float:
    r"""Return the epsilon that guesses about one run prove.

    A fair coin for each of m canaries decides whether it takes part.  An observer of the releases
    guesses r of the coins, and v of these guesses are correct.  If the run is
    (epsilon, delta)-private, then with W binomial of r trials and probability
    e^epsilon / (e^epsilon + 1)

    1. beta <- P[W >= v]
    2. alpha <- the largest P[v - i <= W < v] / i over i = 1 ... v
    3. P[at least v are correct] <= beta + 2 m delta alpha

    and the bound is the smallest epsilon for which 3. is not below 1 - confidence.  The canaries
    may depend on one another in any way.

    Source: Steinke, Nasr and Jagielski, "Privacy Auditing with One (1) Training Run", NeurIPS 2023,
    Theorem 5.2, for neighbours that differ by adding or removing one sample.

    Args:
        correct: v, from 0 to ``guesses``.
        guesses: r, fixed before the coins are known.
        canaries: m, at least ``guesses``.
        delta: from 0 to below 1.
        confidence: the probability, between 0 and 1, with which the bound holds.

    Raises:
        ValueError: for numbers out of range.

    Example::

        >>> from benchmarks.audit.attacks.bounds import epsilon_lower_bound
        >>> round(epsilon_lower_bound(correct=98, guesses=100, canaries=1000, delta=1e-5), 2)
        2.71
    """
    if not 0 <= correct <= guesses <= canaries:
        raise ValueError(
            f"{correct} correct guesses of {guesses} for {canaries} canaries: need "
            "0 <= correct <= guesses <= canaries"
        )
    if not 0 <= delta < 1:
        raise ValueError(f"delta must be in [0, 1), got {delta!r}")
    chance = 1 - _require_confidence(confidence)

    def excess(epsilon: float) -> float:
        """Return the difference between 3. and the chance."""
        masses = binom.pmf(np.arange(guesses + 1), guesses, expit(epsilon))
        below = np.cumsum(masses[:correct][::-1]) / np.arange(1, correct + 1)
        right = masses[correct:].sum() + 2 * canaries * delta * below.max(initial=0.0)
        return float(right) - chance

    return _root(excess, _MOST_EPSILON)


def gaussian_lower_bound(
    false_positives: int, absent: int, false_negatives: int, present: int, confidence: float = 0.95
) -> float:
    r"""Return the mu of the Gaussian mechanism that a threshold test proves.

    A mechanism is mu-GDP if no test tells its outputs with and without one sample apart better than
    one draw of N(mu, 1) from one of N(0, 1).  Noise of sigma, in T steps with the sample in each
    batch, has mu = sqrt(T) / sigma.  The bound is

        mu >= Phi^-1(1 - a) - Phi^-1(b)

    with a and b the upper Clopper-Pearson limits of both error rates, at (1 + confidence) / 2 each.
    A bound above the claimed mu disproves the claim, for any mechanism.

    Source: Nasr et al., "Tight Auditing of Differentially Private Machine Learning", USENIX
    Security 2023; Dong, Roth and Su, "Gaussian Differential Privacy", JRSS B 2022.

    Args:
        false_positives: wrong answers among the ``absent`` trials without the sample.
        false_negatives: wrong answers among the ``present`` trials with the sample.
        confidence: see :func:`epsilon_lower_bound`.

    Raises:
        ValueError: for numbers out of range.

    Example::

        >>> from benchmarks.audit.attacks.bounds import gaussian_lower_bound
        >>> round(gaussian_lower_bound(31, 100, 31, 100), 2)  # the truth may be 1
        0.45
    """
    each = 1 - (1 - _require_confidence(confidence)) / 2
    errors = []
    for wrong, trials in ((false_positives, absent), (false_negatives, present)):
        if not 0 <= wrong <= trials:
            raise ValueError(f"{wrong} wrong answers of {trials} trials")
        errors.append(error_rate_bound(wrong, trials, each))
    if not 0 < max(errors) < 1:
        return 0.0
    return max(0.0, float(norm.isf(errors).sum()))


def error_rate_bound(wrong: int, trials: int, confidence: float) -> float:
    """Return the upper Clopper-Pearson limit of a probability: 1 without trials.

    Example::

        >>> from benchmarks.audit.attacks.bounds import error_rate_bound
        >>> round(error_rate_bound(wrong=0, trials=100, confidence=0.95), 3)
        0.03
    """
    return 1.0 if wrong == trials else float(beta.ppf(confidence, wrong + 1, trials - wrong))


def gaussian_epsilon(mu: float, delta: float) -> float:
    """Return the exact epsilon of a mu-GDP mechanism.

    delta = Phi(mu / 2 - epsilon / mu) - e^epsilon Phi(-mu / 2 - epsilon / mu), solved for epsilon
    (Balle and Wang, "Improving the Gaussian Mechanism for Differential Privacy", ICML 2018).

    Example::

        >>> from benchmarks.audit.attacks.bounds import gaussian_epsilon
        >>> round(gaussian_epsilon(1.0, delta=1e-5), 2)
        4.38
    """
    if mu <= 0:
        return 0.0

    def excess(epsilon: float) -> float:
        """Return the difference between delta and the delta of this epsilon."""
        upper, lower = norm.logcdf(np.array([1, -1]) * mu / 2 - epsilon / mu)
        # e^epsilon alone may overflow where the product is small.
        return delta - math.exp(upper) + math.exp(epsilon + lower)

    return _root(excess, mu * mu / 2 + 40 * mu)


def binomial_tail(at_least: int, trials: int, probability: float) -> float:
    """Return P[W >= at_least] for W binomial.

    Example::

        >>> from benchmarks.audit.attacks.bounds import binomial_tail
        >>> round(binomial_tail(9, 10, 0.5), 4)
        0.0107
    """
    return float(binom.sf(at_least - 1, trials, probability))


def _root(excess: Callable[[float], float], most: float) -> float:
    """Return the point from 0 on at which an increasing function becomes positive."""
    return 0.0 if excess(0.0) >= 0 else float(brentq(excess, 0.0, most, xtol=1e-9))


def _require_confidence(confidence: float) -> float:
    if not 0 < confidence < 1:
        raise ValueError(f"confidence must be between 0 and 1, got {confidence!r}")
    return confidence
