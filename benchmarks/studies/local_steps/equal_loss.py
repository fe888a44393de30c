"""What a method needs to reach a loss."""

from collections.abc import Sequence
from itertools import pairwise

from benchmarks.studies.local_steps.methods import ALL_REDUCE
from comm_hooks.launchers.lab.outcomes import Outcome, Point

_SHARE = 0.75


def default_target(outcomes: Sequence[Outcome]) -> float | None:
    """Return the loss of all-reduce after three quarters of the steps; None without all-reduce.

    So what is compared may take a third more steps.
    """
    curve = next((o.mean_curve() for o in outcomes if o.name == ALL_REDUCE), [])
    if not curve:
        return None
    place = _SHARE * curve[-1].round
    for before, after in pairwise(curve):
        if before.round <= place <= after.round:
            return _between(before.round, after.round, before.loss, after.loss, place)
    return curve[-1].loss


def needed(curve: Sequence[Point], target: float) -> tuple[float, float] | None:
    """Return the steps and the bytes after which a loss is reached first; None if it is not.

    Between two points both are interpolated linearly.

    Example::

        >>> curve = [Point(10, 3.0, 0.9, 400), Point(20, 2.0, 0.8, 800)]
        >>> needed(curve, 2.25), needed(curve, 1.9)
        ((17.5, 700.0), None)
    """
    if curve and curve[0].loss <= target:
        return float(curve[0].round), float(curve[0].bytes_sent)
    for before, after in pairwise(curve):
        if after.loss <= target:
            return (
                _between(before.loss, after.loss, before.round, after.round, target),
                _between(before.loss, after.loss, before.bytes_sent, after.bytes_sent, target),
            )
    return None


def _between(left: float, right: float, low: float, high: float, place: float) -> float:
    return low + (high - low) * (place - left) / (right - left)
