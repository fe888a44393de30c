"""The epsilon of planned or taken steps, against each kind of observer."""

from collections.abc import Sequence
from dataclasses import dataclass

from comm_hooks.optim.private.accounting import Accountant, GaussianEvent
from comm_hooks.optim.private.accounting.events import seen_by
from comm_hooks.optim.private.errors import PrivacyError


@dataclass(frozen=True)
class Claim:
    """The epsilon of a training for three observers.

    Attributes:
        epsilon: against an observer of the model at every step.
        checkpoint_epsilon: against an observer that also reads the checkpoints of single ranks;
            None for no protection.
        rank_epsilon: against an observer of the messages of single ranks; None for no protection.
        delta: the probability with which each epsilon may fail to hold.
        steps: the number of steps in total.
    """

    epsilon: float
    checkpoint_epsilon: float | None
    rank_epsilon: float | None
    delta: float
    steps: int


def claim(events: Sequence[GaussianEvent], delta: float, accountant: Accountant) -> Claim:
    """Return the guarantee of steps that were taken or are planned.

    Args:
        events: the steps, with the multipliers of their placement:
            :meth:`~comm_hooks.optim.private.Verdict.recorded` adds them to a planned event, and a
            ledger's events have them.
        delta: see :meth:`Accountant.epsilon`.
        accountant: the accountant that computes epsilon.

    Raises:
        ValueError: for a history without events and a delta out of range.

    Example::

        >>> from comm_hooks.optim.private import Scheme, judge
        >>> from comm_hooks.optim.private.accounting import GaussianEvent, RDPAccountant
        >>> verdict = judge(Scheme(place="shares", world_size=4))
        >>> plan = verdict.recorded(GaussianEvent(2.0, 0.01, steps=100), "shares")
        >>> found = claim([plan], 1e-5, RDPAccountant())
        >>> round(found.epsilon, 2), round(found.rank_epsilon, 2)
        (0.26, 1.21)
    """

    def against(observer: str) -> float | None:
        try:
            return accountant.epsilon(seen_by(observer, events), delta)
        except PrivacyError:
            return None

    return Claim(
        accountant.epsilon(events, delta),
        against("checkpoint"),
        against("rank"),
        delta,
        sum(event.steps for event in events),
    )
