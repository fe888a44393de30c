"""Calibration: the noise that a privacy budget requires, and the steps that it allows."""

import bisect
import math
from collections.abc import Iterable
from dataclasses import replace

from comm_hooks.config import unknown
from comm_hooks.optim.private.accounting.accountant import Accountant, RDPAccountant, require_delta
from comm_hooks.optim.private.accounting.events import GaussianEvent
from comm_hooks.optim.private.accounting.pld import PLDAccountant
from comm_hooks.requirements import require_within

ACCOUNTANTS: dict[str, type[Accountant]] = {"rdp": RDPAccountant, "pld": PLDAccountant}

# Beyond, more noise changes nothing: the remaining epsilon comes from delta and the orders.
_MOST_NOISE = 1e6
_MOST_STEPS = 10**15
# The largest relative excess over the smallest noise multiplier.
_TOLERANCE = 1e-4


def build_accountant(accountant: Accountant | str) -> Accountant:
    """Return the accountant named ``"rdp"`` or ``"pld"``; return an ``Accountant`` unchanged.

    Raises:
        ValueError: for an unknown name.  There is no ``"gdp"``: the central limit theorem
            under-estimates epsilon.
        ImportError: for ``"pld"`` without dp-accounting.

    Example::

        >>> from comm_hooks.optim.private.accounting import build_accountant
        >>> build_accountant("rdp")
        RDPAccountant(orders=<155>)
    """
    if isinstance(accountant, Accountant):
        return accountant
    if not isinstance(accountant, str) or accountant not in ACCOUNTANTS:
        raise ValueError(unknown("accountant", accountant, ACCOUNTANTS))
    return ACCOUNTANTS[accountant]()


def noise_multiplier_for(
    target_epsilon: float,
    target_delta: float,
    *,
    sample_rate: float,
    steps: int,
    accountant: Accountant | str = "rdp",
    spent: Iterable[GaussianEvent] = (),
) -> float:
    """Return the smallest noise multiplier with which the steps stay within the budget.

    Args:
        target_epsilon, target_delta: the privacy budget.
        sample_rate: the probability that a sample is in a batch, from above 0 to 1.
        steps: the number of steps to be taken.
        accountant: ``"rdp"``, ``"pld"`` or an :class:`Accountant`.
        spent: earlier releases, which count against the budget.

    Returns:
        The noise multiplier, with a relative excess up to 1e-4; epsilon is never above the target.

    Raises:
        ValueError: for values out of range and for a target that no noise reaches.

    Example::

        >>> from comm_hooks.optim.private.accounting import noise_multiplier_for
        >>> round(noise_multiplier_for(8.0, 1e-5, sample_rate=0.01, steps=10_000), 2)
        0.92
    """
    require_within("noise_multiplier_for", "target_epsilon", target_epsilon, "(0, inf)")
    require_delta(target_delta, "target_delta")
    require_within("noise_multiplier_for", "sample_rate", sample_rate, "(0, 1]")
    by = build_accountant(accountant)
    history = list(spent)

    def excess(noise_multiplier: float) -> float:
        events = [*history, GaussianEvent(noise_multiplier, sample_rate, steps)]
        epsilon = by.epsilon(events, target_delta)
        return math.log(epsilon / target_epsilon) if epsilon else -math.inf

    low = high = 1.0
    above = below = excess(high)
    while below > 0:
        low, above, high = high, below, 2 * high
        below = excess(high)
        if high > _MOST_NOISE:
            raise ValueError(
                f"noise_multiplier_for: target_epsilon {target_epsilon} cannot be reached with "
                f"target_delta {target_delta}: however much noise is added"
                f"{', after what was spent before' if history else ''}, {by!r} gives no less than "
                f"{target_epsilon * math.exp(below):.2g}. Choose a larger target"
            )
    while above <= 0:
        high, below, low = low, above, low / 2
        above = excess(low)
    while high > low * (1 + _TOLERANCE):
        # epsilon is close to a power of the noise: a straight line in logarithms.  The middle stays
        # away from the ends, so that both of them come closer.
        share = above / (above - below) if math.isfinite(above - below) else 0.5
        middle = low * (high / low) ** min(max(share, 0.05), 0.95)
        if (value := excess(middle)) > 0:
            low, above = middle, value
        else:
            high, below = middle, value
    return high


def max_steps(
    target_epsilon: float,
    target_delta: float,
    *,
    noise_multiplier: float,
    sample_rate: float,
    accountant: Accountant | str = "rdp",
    spent: Iterable[GaussianEvent] = (),
) -> int:
    """Return the largest number of further steps after which epsilon is still <= the target.

    Args:
        target_epsilon, target_delta: the privacy budget.
        noise_multiplier: the noise multiplier of the further steps.
        sample_rate: the sample rate of the further steps, from above 0 to 1.
        accountant: ``"rdp"``, ``"pld"`` or an :class:`Accountant`.
        spent: earlier releases, with any noise and sampling.

    Returns:
        The number of further steps; 0 if not even one more is within the budget.

    Raises:
        ValueError: for values out of range.

    Example::

        >>> from comm_hooks.optim.private.accounting import GaussianEvent, max_steps
        >>> max_steps(8.0, 1e-5, noise_multiplier=5.0, sample_rate=4096 / 45000)
        7227
        >>> spent = [GaussianEvent(noise_multiplier=3.0, sample_rate=4096 / 45000, steps=1000)]
        >>> max_steps(8.0, 1e-5, noise_multiplier=5.0, sample_rate=4096 / 45000, spent=spent)
        4312
    """
    require_within("max_steps", "target_epsilon", target_epsilon, "(0, inf)")
    require_delta(target_delta, "target_delta")
    step = GaussianEvent(noise_multiplier, sample_rate)
    require_within("max_steps", "sample_rate", sample_rate, "(0, 1]")
    by = build_accountant(accountant)
    history = list(spent)

    def epsilon(steps: int) -> float:
        return by.epsilon([*history, replace(step, steps=steps)], target_delta)

    # Doubled first: an epsilon of many steps takes an accountant long to compute.
    high = 1
    while epsilon(high) <= target_epsilon:
        high *= 2
        if high > _MOST_STEPS:
            raise ValueError(
                f"max_steps: target_epsilon {target_epsilon} lasts for more than {_MOST_STEPS:.0e} "
                f"steps: check noise_multiplier {noise_multiplier} and sample_rate {sample_rate}"
            )
    return bisect.bisect_right(
        range(1, high + 1), target_epsilon, lo=high // 2, hi=high - 1, key=epsilon
    )
