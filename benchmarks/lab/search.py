"""As many tries for every method: a line search on the logarithm of the learning rate."""

import functools
import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from benchmarks.lab.outcomes import Method, Outcome
from benchmarks.lab.runs import Run, RunSpec, RunStore, Tuned

FACTOR = 4.0
"""Between neighbouring learning rates, where nothing else is said."""

_FEWEST = 3  # tries, of which one can lie between two others
_DIGITS = 6  # of the logarithms of distances that count as equal


def search(
    evaluate: Callable[[float], float],
    start: float,
    tries: int,
    factor: float = FACTOR,
    more: int = 0,
) -> dict[float, float]:
    """Look for the learning rate with the smallest loss.

    1. try ``start``;
    2. while the best so far is the largest tried, try ``factor`` times that; while it is the
       smallest, that much less;
    3. otherwise try the geometric mean of the best and the further of its neighbours; of equally
       far ones, the better;
    4. after ``tries`` tries, at least 3, go on with step 2 while the best is at the edge.

    So no method is stuck at the edge of a grid that suits another, and all get the same number of
    tries, but for those that began too far away.

    Args:
        evaluate: the loss at a learning rate; infinite if training diverges.
        start: where to begin.
        tries: how often ``evaluate`` is called.
        factor: between neighbouring learning rates, until the best lies between two others.
        more: how often at most in step 4.

    Returns:
        The loss at each learning rate tried.

    Example::

        >>> tried = search(lambda lr: (math.log(lr) - math.log(0.05)) ** 2, start=0.01, tries=5)
        >>> [round(lr, 4) for lr in tried]
        [0.01, 0.04, 0.16, 0.08, 0.02]
    """
    tried = {start: evaluate(start)}
    limit = tries + more if tries >= _FEWEST else tries
    while len(tried) < limit:
        rates = sorted(tried)
        place = rates.index(min(rates, key=lambda rate: tried[rate]))
        if place == len(rates) - 1:
            rate = rates[place] * factor
        elif place == 0:
            rate = rates[place] / factor
        elif len(tried) >= tries:
            break
        else:
            best = rates[place]
            neighbour = min(
                (rates[place - 1], rates[place + 1]),
                key=lambda rate: (-round(abs(math.log(rate / best)), _DIGITS), tried[rate]),
            )
            rate = math.sqrt(best * neighbour)
        tried[rate] = evaluate(rate)
    return tried


class _Missing(Exception):
    """A run that is not there yet and that decides about the next; the argument is its spec."""


@dataclass(frozen=True)
class Tuning:
    """The same rule for every method: tries of the learning rate, then a run for each seed.

    The next runs follow from the runs so far, so an experiment can be interrupted, widened and
    continued. The best settings are those of the smallest loss at the end, on validation data if
    there are such: a loss is smoother than the error, of which small data sets have few values.

    Args:
        tries: learning rates on the first seed; see :func:`search`.
        seeds: of the runs with the best settings.
        factor: between neighbouring learning rates.
        more: tries beyond those while the best is the largest or smallest; by default ``tries``.
        confirm: whether a learning rate with a better loss on the first seed than the best has in
            the mean of all seeds is run with all seeds, too, and the best mean counts. Luck of the
            first seed near divergence then does not decide. Learning rates have three digits, and
            tries count whatever rate they started from.
    """

    tries: int
    seeds: Sequence[int]
    factor: float = FACTOR
    more: int | None = None
    confirm: bool = False

    def next(self, method: Method, runs: RunStore) -> list[RunSpec]:
        """Return the runs that can be made now; none when the method is done."""
        try:
            best = min(self._tried(method, runs), key=lambda run: run.score)
        except _Missing as missing:
            return [missing.args[0]]
        chosen = [best]
        if self.confirm:
            leader = self._leader(method, runs)
            if len(leader) == len(self.seeds):
                bound = _mean(leader)
                chosen = [run for run in self._tried(method, runs) if run.score < bound]
        elif best.failure:
            return []
        specs = [replace(run.spec, seed=seed) for run in chosen for seed in self.seeds]
        absent = [spec for spec in specs if runs.get(spec) is None]
        return absent or (self._beyond(method, runs, leader[0], best) if self.confirm else [])

    def outcome(self, method: Method, runs: RunStore) -> Outcome | None:
        """Return the outcome; None before the best settings are known."""
        try:
            tried = self._tried(method, runs)
        except _Missing:
            return None
        best = min(tried, key=lambda run: run.score)
        found = self._leader(method, runs) if self.confirm else self._seeds_of(best, runs)
        return Outcome(method.name, method.labels, method.note, tried, found)

    def _tried(self, method: Method, runs: RunStore) -> list[Run]:
        """Return the runs of all settings on the first seed; raise _Missing for a missing one."""
        if self.confirm:
            first = method.spec({}, self.seeds[0])
            known = sorted(
                (run for run in runs if replace(run.spec, settings={}) == first),
                key=lambda run: run.settings["lr"],
            )
            best = min(known, key=lambda run: run.score, default=None)
            if len(known) >= max(_FEWEST, self.tries) and best not in (known[0], known[-1]):
                return known
        done: list[Run] = []

        def score_at(rate: float, variant: Tuned) -> float:
            rate = float(f"{rate:.3g}") if self.confirm else rate
            spec = method.spec({"lr": rate, **variant}, self.seeds[0])
            run = runs.get(spec)
            if run is None:
                raise _Missing(spec)
            done.append(run)
            return run.score

        more = self.tries if self.more is None else self.more
        for variant in method.variants:
            evaluate = functools.partial(score_at, variant=variant)
            if "lr" in variant:
                evaluate(variant["lr"])
            else:
                search(evaluate, method.start, self.tries, self.factor, more)
        return known if self.confirm else done

    def _seeds_of(self, run: Run, runs: RunStore) -> list[Run]:
        """Return the runs of the same settings, in the order of seeds."""
        found = (runs.get(replace(run.spec, seed=seed)) for seed in self.seeds)
        return [run for run in found if run is not None]

    def _leader(self, method: Method, runs: RunStore) -> list[Run]:
        """Return the runs of the best learning rate by seed: of those with most seeds, by mean."""
        candidates = [self._seeds_of(run, runs) for run in self._tried(method, runs)]
        return min(candidates, key=lambda found: (-len(found), _mean(found)))

    def _beyond(self, method: Method, runs: RunStore, chosen: Run, best: Run) -> list[RunSpec]:
        """Return the next rate if the means, not the first seed, lead to the edge of the tried."""
        tried = self._tried(method, runs)
        is_edge = chosen is tried[0], chosen is tried[-1]
        most = self.tries + 2 * (self.more or self.tries)
        if chosen is best or not any(is_edge) or len(tried) >= most:
            return []
        further = chosen.settings["lr"] * (1 / self.factor if is_edge[0] else self.factor)
        return [replace(chosen.spec, settings={"lr": float(f"{further:.3g}")})]


def _mean(runs: Sequence[Run]) -> float:
    return statistics.mean(run.score for run in runs)
