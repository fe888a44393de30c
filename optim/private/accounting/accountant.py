"""Accountants: bounds of epsilon for a history of releases; by Renyi divergences by default."""

import math
from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence

import numpy as np

from comm_hooks.optim.private.accounting.events import GaussianEvent, steps_by
from comm_hooks.optim.private.accounting.renyi import renyi_divergences
from comm_hooks.requirements import in_one_line, is_number

DELTA_FLOOR = 1e-12
"""The smallest delta for which epsilon is claimed.

Gaussian noise ends at 12.2 standard deviations, where 3e-34 is left: an observer of 10^15 numbers
meets the missing part with probability 3e-19, times 1 + exp(epsilon): a millionth of the floor at
epsilon 1, and a hundredth at 10."""

#: Opacus 1.6's orders: 1.1, 1.2 ... 10.9 and 12, 13 ... 63.
OPACUS_ORDERS: tuple[float, ...] = (
    *(1 + tenths / 10 for tenths in range(1, 100)),
    *map(float, range(12, 64)),
)
#: Opacus's orders and 128, 256, 512, 1024: with 63 as the largest no epsilon is below 0.1.
DEFAULT_ORDERS: tuple[float, ...] = (*OPACUS_ORDERS, 128.0, 256.0, 512.0, 1024.0)


class Accountant(ABC):
    """A base class for upper bounds of the privacy cost of a history of releases.

    The guarantee is (epsilon, delta)-differential privacy for neighbours that differ by adding or
    removing one sample (or client).  For the messages and files of single ranks, the sample is
    replaced by one without influence instead: samples are dealt to ranks by their places, and
    removing one would move all later samples.  A subclass implements :meth:`_epsilon`.

    Example::

        >>> from comm_hooks.optim.private.accounting import GaussianEvent, RDPAccountant
        >>> round(RDPAccountant().epsilon([GaussianEvent(1.0, 0.01, steps=1000)], delta=1e-5), 2)
        2.1
    """

    def epsilon(self, events: Iterable[GaussianEvent], delta: float) -> float:
        """Return an upper bound of epsilon for all of the events together.

        Args:
            events: the history, in any order.
            delta: the probability, from 1e-12 to 1, with which epsilon may fail.  Take less than
                one over the number of samples.

        Raises:
            ValueError: for a history without events and a delta out of range.
        """
        require_delta(delta)
        steps = steps_by(lambda event: event.mechanism, events)
        if not steps:
            raise ValueError("epsilon: no step has been taken: nothing was released yet")
        return self._epsilon(steps, float(delta))

    @abstractmethod
    def _epsilon(self, steps: dict[tuple[float, float], int], delta: float) -> float:
        """Return epsilon for ``steps``: numbers of steps by (noise multiplier, sample rate)."""


class RDPAccountant(Accountant):
    """An accountant that sums Renyi divergences per order, and takes the smallest epsilon.

    Divergences of steps add up (Mironov, "Renyi Differential Privacy", CSF 2017); those of one step
    are in :func:`~comm_hooks.optim.private.accounting.renyi.renyi_divergences`.  With R(a) the sum
    at order a, epsilon = min_a R(a) + log(1 - 1/a) - (log(delta) + log(a)) / (a - 1) (Balle et al.,
    "Hypothesis Testing Interpretations and Renyi Differential Privacy", AISTATS 2020, Theorem 21),
    as in Opacus.  The bound holds for any list of orders; more orders make it tighter.

    Args:
        orders: the orders of the divergences, all greater than 1.  By default Opacus's and 128,
            256, 512 and 1024 (:data:`DEFAULT_ORDERS`); :data:`OPACUS_ORDERS` reproduce Opacus.

    Raises:
        ValueError: for orders of 1 or less.

    Example::

        >>> from comm_hooks.optim.private.accounting import GaussianEvent, RDPAccountant
        >>> accountant = RDPAccountant()
        >>> history = [GaussianEvent(noise_multiplier=5.0, sample_rate=4096 / 45000, steps=7227)]
        >>> round(accountant.epsilon(history, delta=1e-5), 3)
        8.0
    """

    def __init__(self, *, orders: Sequence[float] = DEFAULT_ORDERS) -> None:
        self.orders = tuple(map(float, orders))
        if not self.orders or not all(1 < order < math.inf for order in self.orders):
            raise ValueError(
                f"RDPAccountant: orders must be greater than 1 and finite, got {orders!r}"
            )
        alphas = np.array(self.orders)
        # The conversion does not depend on the history, except for log(delta).
        self._per_log_delta = -1 / (alphas - 1)
        self._offset = np.log1p(-1 / alphas) - np.log(alphas) / (alphas - 1)

    def _epsilon(self, steps: dict[tuple[float, float], int], delta: float) -> float:
        total = self._offset + math.log(delta) * self._per_log_delta
        for (noise_multiplier, sample_rate), count in steps.items():
            total = total + count * renyi_divergences(noise_multiplier, sample_rate, self.orders)
        if all(sample_rate == 0 for _, sample_rate in steps):
            return 0.0
        return max(0.0, float(total.min()))

    def __repr__(self) -> str:
        return f"RDPAccountant(orders=<{len(self.orders)}>)"


def require_delta(delta: float, name: str = "delta") -> None:
    """Raise ``ValueError`` for a delta that is not between :data:`DELTA_FLOOR` and 1."""
    if not is_number(delta) or not DELTA_FLOOR <= delta < 1:
        raise ValueError(
            f"{name} must be at least {DELTA_FLOOR:g} (noise ends at 12 standard deviations) and "
            f"below one over the number of samples, got {in_one_line(delta)}"
        )
