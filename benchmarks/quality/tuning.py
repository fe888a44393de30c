"""What is to be run next: learning rates by the same rule for every method, then the other seeds.

All follows from the records, so a campaign can be interrupted, widened and continued.
"""

import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from benchmarks.lab.search import search
from benchmarks.quality.runs import Record, Wanted
from benchmarks.quality.settings import Setting

FACTOR = 2.0
"""Between neighbouring learning rates, until the best lies between two others."""
_MORE = 4
"""Tries beyond those that all get, while the best is the largest or smallest tried."""

Records = Mapping[Wanted, Record]


class _Missing(Exception):
    """A run without a record, whose result decides about the next."""


@dataclass(frozen=True)
class Entry:
    """A method in a setting: what is tuned, and what it has come to.

    Args:
        setting: what is trained.
        method: as ``python -m benchmarks.compare --hooks`` takes it.
        start: the first learning rate.
        tries: learning rates tried, on the first seed; a few more while the best lies at the edge.
        seeds: that the best of them is run with.  Where another has done better on the first seed
            than it does on the mean of all, they have met, by luck, on the verge of divergence:
            that one is run with all seeds as well, and the best mean counts.
    """

    setting: Setting
    method: str
    start: float
    tries: int
    seeds: Sequence[int]

    def next(self, records: Records) -> list[Wanted]:
        """Return the runs that can be made now; none if all have been."""
        best = self.best(records)
        if isinstance(best, Wanted):
            return [best]
        rates = [best.wanted.lr]
        leader = self.finished(records)
        if len(leader) == len(self.seeds):
            bound = _mean(leader)
            rates = [r.wanted.lr for r in self._tried(records) if r.judged < bound]
        wanted = (replace(best.wanted, lr=lr, seed=seed) for lr in rates for seed in self.seeds)
        missing = [each for each in wanted if each not in records]
        return missing or self._beyond(leader[self.seeds[0]], best, records)

    def _beyond(self, chosen: Record, best: Record, records: Records) -> list[Wanted]:
        """Return the next rate if the means, not the first seed, lead to the edge of the tried."""
        tried = self._tried(records)
        is_edge = chosen is tried[0], chosen is tried[-1]
        if chosen is best or not any(is_edge) or len(tried) >= self.tries + 2 * _MORE:
            return []
        further = chosen.wanted.lr * (1 / FACTOR if is_edge[0] else FACTOR)
        return [replace(chosen.wanted, lr=float(f"{further:.3g}"))]

    def best(self, records: Records) -> Record | Wanted:
        """Return the record of the best learning rate on the first seed, or what is to run first.

        A run that diverged counts as infinitely bad.
        """
        first = Wanted(self.setting, self.method, self.start, self.seeds[0])
        if known := self._known(records):
            return known
        found: list[Record] = []

        def loss_at(rate: float) -> float:
            wanted = replace(first, lr=float(f"{rate:.3g}"))
            if wanted not in records:
                raise _Missing(wanted)
            found.append(records[wanted])
            return found[-1].judged

        try:
            search(loss_at, self.start, self.tries, FACTOR, _MORE)
        except _Missing as missing:
            wanted: Wanted = missing.args[0]
            return wanted
        return min(found, key=lambda record: record.judged)

    def _known(self, records: Records) -> Record | None:
        """Return the best of enough rates, one of which is not at the edge, wherever they began."""
        tried = self._tried(records)
        if len(tried) < max(3, self.tries):
            return None
        best = min(tried, key=lambda record: record.judged)
        return best if best not in (tried[0], tried[-1]) else None

    def _tried(self, records: Records) -> list[Record]:
        """Return the records of all learning rates on the first seed, in order."""
        first = Wanted(self.setting, self.method, self.start, self.seeds[0])
        same = [r for w, r in records.items() if replace(w, lr=self.start) == first]
        return sorted(same, key=lambda record: record.wanted.lr)

    def is_at_edge(self, records: Records) -> bool:
        """Return whether the best learning rate is the largest or smallest of several tried.

        Others beyond it may be better.
        """
        tried, finished = self._tried(records), self.finished(records)
        best = finished.get(self.seeds[0])
        return len(tried) > 1 and best in (tried[0], tried[-1])

    def finished(self, records: Records) -> dict[int, Record]:
        """Return the records of the best learning rate by seed; empty before it is known.

        Of the rates that most seeds were run with, that of the best mean.
        """
        if isinstance(self.best(records), Wanted):
            return {}
        return min(self._by_rate(records), key=lambda found: (-len(found), _mean(found)))

    def _by_rate(self, records: Records) -> Iterable[dict[int, Record]]:
        for tried in self._tried(records):
            wanted = {seed: replace(tried.wanted, seed=seed) for seed in self.seeds}
            yield {seed: records[each] for seed, each in wanted.items() if each in records}


def _mean(by_seed: Mapping[int, Record]) -> float:
    return statistics.mean(record.judged for record in by_seed.values())


def by_wanted(records: Iterable[Record]) -> Records:
    """Return the records by what was wanted; the last of several counts."""
    return {record.wanted: record for record in records}
