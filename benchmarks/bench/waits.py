"""How many steps until a loss."""

from collections.abc import Sequence

from benchmarks.bench.results import Result
from benchmarks.lab.runs import BASELINE, CONTROL, Point


def halfway_loss(results: Sequence[Result]) -> float | None:
    """Return the loss halfway from exchanging nothing to an all-reduce, at the end of training.

    None if either is missing or communication was worth nothing.
    """
    losses = {r.run.method: r.run.figures.loss for r in results if r.run.figures}
    if not losses.keys() >= {BASELINE, CONTROL} or losses[BASELINE] >= losses[CONTROL]:
        return None
    return (losses[BASELINE] + losses[CONTROL]) / 2


def steps_until(loss: float, curve: Sequence[Point]) -> float | None:
    """Return after how many steps a curve reaches a loss for good; None if it does not.

    Between two points of the curve losses are interpolated. A curve that begins below the loss has
    reached it, for all that is known, at its first point.
    """
    below = len(curve)
    while below and curve[below - 1].loss <= loss:
        below -= 1
    if below == len(curve):
        return None
    last = curve[below]
    if not below:
        return float(last.round)
    first = curve[below - 1]
    share = (first.loss - loss) / (first.loss - last.loss)
    return first.round + share * (last.round - first.round)
