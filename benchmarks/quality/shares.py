"""The figure that leads: the share of what exchanging is worth that a method keeps."""

import math
import statistics
from collections.abc import Mapping
from dataclasses import dataclass

from benchmarks.quality.runs import Record

_SURE = 3.0
"""What exchanging is worth must be so many times its own uncertainty to be divided by."""


@dataclass(frozen=True)
class Share:
    """(none - method) / (none - all-reduce).

    Args:
        mean: ratio of the mean differences over the seeds that all three have.
        spread: half the distance between the largest and the smallest share of a single seed.
        seeds: how many.
    """

    mean: float
    spread: float
    seeds: int

    def __str__(self) -> str:
        spread = f" ± {100 * self.spread:.0f}" if self.seeds > 1 else ""
        return f"{100 * self.mean:.0f}{spread} %"


def share_kept(
    method: Mapping[int, Record], none: Mapping[int, Record], all_reduce: Mapping[int, Record]
) -> Share | None:
    """Return what a method keeps, from records by seed.

    None if there is no seed that all three finished, and if exchanging is worth too little to be
    told from the noise between seeds.
    """
    seeds = sorted(method.keys() & none.keys() & all_reduce.keys())
    losses = [(none[s].loss, method[s].loss, all_reduce[s].loss) for s in seeds]
    finished = [(n, m, a) for n, m, a in losses if n is not None and a is not None]
    if not finished:
        return None
    worth = [n - a for n, _, a in finished]
    mean = statistics.mean(worth)
    noise = statistics.stdev(worth) / math.sqrt(len(worth)) if len(worth) > 1 else 0.0
    if mean <= 0 or mean < _SURE * noise:
        return None
    kept = [math.inf if m is None else n - m for n, m, _ in finished]
    if math.inf in kept:  # one that diverged keeps nothing
        return Share(-math.inf, math.inf, len(kept))
    shares = [k / w for k, w in zip(kept, worth, strict=True)]
    return Share(statistics.mean(kept) / mean, (max(shares) - min(shares)) / 2, len(shares))
