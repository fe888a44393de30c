"""From guesses to epsilon: what so many right ones prove, whatever made them.

All bounds are lower ones, of the true epsilon, and hold with the confidence that is asked for.
"""

import math
from collections.abc import Callable
from functools import lru_cache
from statistics import NormalDist

import numpy as np
import numpy.typing as npt

_MOST_EPSILON = 100.0
_HALVINGS = 50


def epsilon_lower_bound(
    correct: int, guesses: int, canaries: int, delta: float, confidence: float = 0.95
) -> float:
    r"""Return the epsilon that guesses of who took part in one run prove.

    Each of m canaries took part by a fair coin of its own; somebody saw what was released, guessed
    for r of them whether they did, and was right for v.  If the run is (epsilon, delta)-private,
    then with W binomial of r trials and probability e^epsilon / (e^epsilon + 1)

    1. beta <- P[W >= v]
    2. alpha <- the largest P[v - i <= W < v] / i over i = 1 ... v
    3. P[at least v are right] <= beta + 2 m delta alpha

    and the bound is the smallest epsilon for which 3. is not below 1 - confidence.  The canaries
    may depend on one another in every way.

    Source: Steinke, Nasr and Jagielski, "Privacy Auditing with One (1) Training Run", NeurIPS 2023,
    Theorem 5.2, for neighbours that differ by adding or removing one sample.

    Args:
        correct: v, from 0 to ``guesses``.
        guesses: r, decided before it is known which are right.
        canaries: m, at least ``guesses``.
        delta: from 0 to below 1.
        confidence: the probability, between 0 and 1, with which the bound holds.

    Raises:
        ValueError: for numbers out of range.

    Example::

        >>> from comm_hooks.launchers.audit.bounds import epsilon_lower_bound
        >>> round(epsilon_lower_bound(correct=98, guesses=100, canaries=1000, delta=1e-5), 2)
        2.71
    """
    if not 0 <= correct <= guesses <= canaries:
        raise ValueError(
            f"of {canaries} canaries {guesses} were guessed and {correct} rightly: need "
            "0 <= correct <= guesses <= canaries"
        )
    if not 0 <= delta < 1:
        raise ValueError(f"delta must be in [0, 1), got {delta!r}")
    chance = 1 - _require_confidence(confidence)

    def is_refuted(epsilon: float) -> bool:
        right = 1 / (1 + math.exp(-epsilon))
        masses = _binomial(guesses, right)
        beta = float(masses[correct:].sum())
        below = np.cumsum(masses[:correct][::-1]) / np.arange(1, correct + 1)
        alpha = float(below.max(initial=0.0))
        return beta + 2 * canaries * delta * alpha < chance

    return _last_refuted(is_refuted, _MOST_EPSILON)


def gaussian_lower_bound(
    false_positives: int, absent: int, false_negatives: int, present: int, confidence: float = 0.95
) -> float:
    r"""Return the mu of the Gaussian mechanism that a threshold test proves.

    A mechanism is mu-GDP if no test tells its outputs with and without one sample apart better than
    one draw of N(mu, 1) from one of N(0, 1); sigma alone, in T steps in which the sample is in the
    batch, is sqrt(T) / sigma.  The bound is

        mu >= Phi^-1(1 - a) - Phi^-1(b)

    with a and b the upper Clopper-Pearson limits of both error rates, at (1 + confidence) / 2 each.
    If the mechanism claims to be mu-GDP and the bound exceeds that, then the claim is false, of
    whatever kind the mechanism is.

    Source: Nasr et al., "Tight Auditing of Differentially Private Machine Learning", USENIX
    Security 2023; Dong, Roth and Su, "Gaussian Differential Privacy", JRSS B 2022.

    Args:
        false_positives: out of ``absent`` trials without the sample, those that were taken for
            trials with it.
        false_negatives: out of ``present`` trials with the sample, those taken for trials without.
        confidence: see :func:`epsilon_lower_bound`.

    Raises:
        ValueError: for numbers out of range.

    Example::

        >>> from comm_hooks.launchers.audit.bounds import gaussian_lower_bound
        >>> round(gaussian_lower_bound(31, 100, 31, 100), 2)  # the truth may be 1
        0.45
    """
    each = 1 - (1 - _require_confidence(confidence)) / 2
    standard = NormalDist()
    errors = []
    for wrong, trials in ((false_positives, absent), (false_negatives, present)):
        if not 0 <= wrong <= trials:
            raise ValueError(f"{wrong} wrong answers of {trials} trials")
        errors.append(error_rate_bound(wrong, trials, each))
    if not 0 < max(errors) < 1:
        return 0.0
    return max(0.0, -standard.inv_cdf(errors[0]) - standard.inv_cdf(errors[1]))


def error_rate_bound(wrong: int, trials: int, confidence: float) -> float:
    """Return the upper Clopper-Pearson limit of a probability: 1 without trials.

    Example::

        >>> from comm_hooks.launchers.audit.bounds import error_rate_bound
        >>> round(error_rate_bound(wrong=0, trials=100, confidence=0.95), 3)
        0.03
    """
    if wrong == trials:
        return 1.0
    chance = 1 - confidence
    return _last_refuted(
        # Rates that would make so few wrong answers too likely are not yet the limit.
        lambda rate: float(_binomial(trials, rate)[: wrong + 1].sum()) > chance,
        1.0,
    )


def gaussian_epsilon(mu: float, delta: float) -> float:
    """Return the exact epsilon of a mu-GDP mechanism.

    delta = Phi(mu / 2 - epsilon / mu) - e^epsilon Phi(-mu / 2 - epsilon / mu), solved for epsilon
    (Balle and Wang, "Improving the Gaussian Mechanism for Differential Privacy", ICML 2018).

    Example::

        >>> from comm_hooks.launchers.audit.bounds import gaussian_epsilon
        >>> round(gaussian_epsilon(1.0, delta=1e-5), 2)
        4.38
    """
    if mu <= 0:
        return 0.0

    def exceeds(epsilon: float) -> bool:
        upper = _normal_cdf(mu / 2 - epsilon / mu)
        lower = _normal_cdf(-mu / 2 - epsilon / mu)
        # e^epsilon alone may overflow where the product is small.
        product = math.exp(epsilon + math.log(lower)) if lower else 0.0
        return upper - product > delta

    return _last_refuted(exceeds, mu * mu / 2 + 40 * mu)


def binomial_tail(at_least: int, trials: int, probability: float) -> float:
    """Return P[W >= at_least] for W binomial.

    Example::

        >>> from comm_hooks.launchers.audit.bounds import binomial_tail
        >>> round(binomial_tail(9, 10, 0.5), 4)
        0.0107
    """
    return float(_binomial(trials, probability)[max(0, at_least) :].sum())


def _binomial(trials: int, probability: float) -> npt.NDArray[np.float64]:
    """Return P[W = w] for w = 0 ... trials."""
    w = np.arange(trials + 1)
    if not 0 < probability < 1:
        return (w == (trials if probability >= 1 else 0)).astype(np.float64)
    logs = w * math.log(probability) + (trials - w) * math.log1p(-probability)
    masses: npt.NDArray[np.float64] = np.exp(_log_choose(trials) + logs)
    return masses


@lru_cache(maxsize=16)
def _log_choose(trials: int) -> npt.NDArray[np.float64]:
    factorials = np.concatenate([[0.0], np.cumsum(np.log(np.arange(1, trials + 1)))])
    chosen: npt.NDArray[np.float64] = factorials[-1] - factorials - factorials[::-1]
    return chosen


def _normal_cdf(x: float) -> float:
    # statistics.NormalDist loses the lower tail to rounding.
    return math.erfc(-x / math.sqrt(2)) / 2


def _last_refuted(is_refuted: Callable[[float], bool], most: float) -> float:
    """Return where a property that holds for small values ceases to, from 0 to ``most``."""
    if not is_refuted(0.0):
        return 0.0
    low, high = 0.0, most
    for _ in range(_HALVINGS):
        middle = (low + high) / 2
        low, high = (middle, high) if is_refuted(middle) else (low, middle)
    return low


def _require_confidence(confidence: float) -> float:
    if not 0 < confidence < 1:
        raise ValueError(f"confidence must be between 0 and 1, got {confidence!r}")
    return confidence
