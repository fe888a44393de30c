"""The contract of accountants, and what all of them refuse."""

from abc import ABC, abstractmethod
from collections.abc import Iterable

from comm_hooks.optim.private.accounting.events import GaussianEvent, steps_per_mechanism

DELTA_FLOOR = 1e-12
"""Gaussian noise ends at 12.2 standard deviations, where 3e-34 is left.  An observer who sees 10^15
numbers meets what is missing with probability 3e-19, times 1 + exp(epsilon): a millionth of this
at epsilon 1, and a hundredth at 10.  Below, no epsilon is claimed."""


class Accountant(ABC):
    """Bounds what a history of releases has cost.

    The guarantee is (epsilon, delta)-differential privacy for neighbours that differ by adding or
    removing one sample (or client).  Where it is of what single ranks send or save, the sample is
    replaced by one without influence instead: samples are dealt to ranks by their places, which
    those after a removed one would change.  A subclass gives :meth:`_epsilon`.

    Example::

        >>> from comm_hooks.optim.private.accounting import GaussianEvent, RDPAccountant
        >>> round(RDPAccountant().epsilon([GaussianEvent(1.0, 0.01, steps=1000)], delta=1e-5), 2)
        2.1
    """

    def epsilon(self, events: Iterable[GaussianEvent], delta: float) -> float:
        """Return an upper bound of epsilon for all of the events together.

        Args:
            events: the history, in any order.
            delta: the probability, from 1e-12 to 1, with which epsilon need not hold.  Take less
                than one over the number of samples.

        Raises:
            ValueError: for a history without events and a delta out of range.
        """
        require_delta(delta)
        steps = steps_per_mechanism(events)
        if not steps:
            raise ValueError("epsilon: no step has been taken: nothing was released")
        return self._epsilon(steps, float(delta))

    @abstractmethod
    def _epsilon(self, steps: dict[tuple[float, float], int], delta: float) -> float:
        """Return epsilon for the steps of each (noise multiplier, sample rate)."""


def require_delta(delta: float, name: str = "delta") -> None:
    """Raise ``ValueError`` for a delta that is not between :data:`DELTA_FLOOR` and 1."""
    if isinstance(delta, bool) or not isinstance(delta, int | float) or not 0 < delta < 1:
        raise ValueError(
            f"{name} must be between 0 and 1, and below one over the number of samples, "
            f"got {delta!r}"
        )
    if delta < DELTA_FLOOR:
        raise ValueError(
            f"{name} must be at least {DELTA_FLOOR:g}, got {delta!r}: noise ends at 12 standard "
            "deviations, which a smaller one would have to count"
        )
