"""As many tries for every method: a line search on the logarithm of the learning rate."""

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
    """The same rule for every method: as many tries, and the best mean over all seeds.

    1. Tries of the learning rate on the first seed, see :func:`search`, the same number for every
       method. Of several variants, the first has all of them but one for each other, which is made
       at the best rate so far.
    2. More of the variant that leads, while its best rate does not lie between two others.
    3. A run for each seed with the best settings.
    4. The same with other settings whose loss on the first seed is better than that mean, and,
       where asked for, with the rates beside the best. The best mean counts: luck of the first
       seed, near divergence above all, does not decide.

    The next runs follow from the runs so far, so an experiment can be interrupted, widened and
    continued. The best settings are those of the smallest loss at the end, on validation data if
    there are such: a loss is smoother than the error, of which small data sets have few values.

    Args:
        tries: learning rates per method, of three digits.  Those of another search count, if it
            came down to the start of this one.
        seeds: of the runs with the best settings.
        factor: between neighbouring learning rates.
        more: tries in a search beyond those while the best is the largest or smallest; by default
            as many again.
        beside: whether the rates beside the best have a run for each seed, too, so that the best
            mean lies between two others.
    """

    tries: int
    seeds: Sequence[int]
    factor: float = FACTOR
    more: int | None = None
    beside: bool = False

    def next(self, method: Method, runs: RunStore) -> list[RunSpec]:
        """Return the runs that can be made now; none when the method is done."""
        try:
            tried = self._tried(method, runs)
        except _Missing as missing:
            return [missing.args[0]]
        best, leader = min(tried, key=lambda run: run.score), self._leader(tried, runs)
        chosen = [best]
        if len(leader) == len(self.seeds):
            bound = _mean(leader)
            chosen = [run for run in tried if run.score < bound]
            if self.beside:
                chosen += _neighbours(leader[0], tried)
        elif best.failure:
            return []
        specs = [replace(run.spec, seed=seed) for run in chosen for seed in self.seeds]
        absent = [spec for spec in specs if runs.get(spec) is None]
        return absent or self._beyond(method, tried, leader[0], best)

    def outcome(self, method: Method, runs: RunStore) -> Outcome | None:
        """Return the outcome; None before the best settings are known."""
        try:
            tried = self._tried(method, runs)
        except _Missing:
            return None
        found = self._leader(tried, runs)
        others: dict[str, list[Run]] = {}
        for run in tried:
            if (variant := variant_of(run)) != variant_of(found[0]):
                others.setdefault(str(variant), []).append(run)
        led = [self._leader(own, runs) for own in others.values()]
        return Outcome(method.name, method.labels, method.note, tried, found, led)

    def _tried(self, method: Method, runs: RunStore) -> list[Run]:
        """Return the runs of all settings on the first seed; raise _Missing for a missing one."""

        def run_at(settings: Tuned) -> Run:
            spec = method.spec(settings, self.seeds[0])
            run = runs.get(spec)
            if run is None:
                raise _Missing(spec)
            return run

        done = [run_at(variant) for variant in method.variants if "lr" in variant]
        searched = [variant for variant in method.variants if "lr" not in variant]
        starts = []
        for place, variant in enumerate(searched):
            best = min(done, key=lambda run: run.score, default=None)
            starts.append(method.start if best is None else best.settings["lr"])
            tries = 1 if place else self._tries_of_first(method)
            done += self._search(method, variant, starts[place], tries, run_at, runs)
        while self._tries_of_first(method) >= _FEWEST:
            own = variant_of(min(done, key=lambda run: run.score))
            if own not in searched[1:]:
                break
            start = starts[searched.index(own)]
            known = self._search(method, own, start, _FEWEST, run_at, runs)
            if all(run in done for run in known):
                break
            done = [run for run in done if variant_of(run) != own] + known
        return done

    def _tries_of_first(self, method: Method) -> int:
        """Return the tries of the first variant: those that leave one for each other."""
        return max(1, self.tries - len(method.variants) + 1)

    def _search(
        self,
        method: Method,
        variant: Tuned,
        start: float,
        tries: int,
        run_at: Callable[[Tuned], Run],
        runs: RunStore,
    ) -> list[Run]:
        """Return the runs of a variant on the first seed, so many and more at the edge."""
        known = self._known(method, variant, runs)
        best = min(known, key=lambda run: run.score, default=None)
        # Known rates may come from a search that began elsewhere.
        is_inside = bool(known) and best not in (known[0], known[-1]) and _rate(known[0]) <= start
        has_begun = tries < _FEWEST and any(_rate(run) == start for run in known)
        if len(known) >= tries and (is_inside or has_begun):
            return known

        def score_at(rate: float) -> float:
            return run_at({"lr": float(f"{rate:.3g}"), **variant}).score

        search(score_at, start, tries, self.factor, tries if self.more is None else self.more)
        return self._known(method, variant, runs)

    def _known(self, method: Method, variant: Tuned, runs: RunStore) -> list[Run]:
        """Return the runs of a variant on the first seed, by learning rate."""
        first = method.spec(variant, self.seeds[0])
        found = [
            run
            for run in runs
            if run.method == first.method
            and run.seed == first.seed
            and run.spec.labels == first.labels
            and variant_of(run) == variant
        ]
        return sorted(found, key=lambda run: run.settings["lr"])

    def _seeds_of(self, run: Run, runs: RunStore) -> list[Run]:
        """Return the runs of the same settings, in the order of seeds."""
        found = (runs.get(replace(run.spec, seed=seed)) for seed in self.seeds)
        return [run for run in found if run is not None]

    def _leader(self, tried: Sequence[Run], runs: RunStore) -> list[Run]:
        """Return the runs of the best settings by seed: of those with most seeds, by mean."""
        candidates = [self._seeds_of(run, runs) for run in tried]
        return min(candidates, key=lambda found: (-len(found), _mean(found)))

    def _beyond(
        self, method: Method, tried: Sequence[Run], chosen: Run, best: Run
    ) -> list[RunSpec]:
        """Return the next rate if the means, not the first seed, lead to the edge of the tried."""
        own = [run for run in tried if variant_of(run) == variant_of(chosen)]
        is_edge = chosen is own[0], chosen is own[-1]
        tries = self._tries_of_first(method)
        most = tries + 2 * (self.more or tries)
        searched = tries >= _FEWEST and variant_of(chosen) in method.variants
        if chosen is best or not searched or not any(is_edge) or len(own) >= most:
            return []
        further = chosen.settings["lr"] * (1 / self.factor if is_edge[0] else self.factor)
        settings = {**chosen.settings, "lr": float(f"{further:.3g}")}
        return [replace(chosen.spec, settings=settings)]


def variant_of(run: Run) -> Tuned:
    """Return the settings of a run, without the learning rate."""
    return {key: value for key, value in run.settings.items() if key != "lr"}


def _neighbours(best: Run, tried: Sequence[Run]) -> list[Run]:
    """Return the finished runs at the rates beside the best, with otherwise its settings."""
    own = sorted((run for run in tried if variant_of(run) == variant_of(best)), key=_rate)
    place = own.index(best)
    beside = own[max(0, place - 1) : place] + own[place + 1 : place + 2]
    return [run for run in beside if not run.failure]


def _rate(run: Run) -> float:
    return run.settings["lr"]


def _mean(runs: Sequence[Run]) -> float:
    return statistics.mean(run.score for run in runs)
