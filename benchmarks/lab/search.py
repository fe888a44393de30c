"""As many tries for every method: a line search on the logarithm of the learning rate."""

import math
from collections.abc import Callable, Sequence

from benchmarks.lab.outcomes import Advance, Method, Outcome, Run, Settings
from benchmarks.lab.progress import Display

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


def run_method(
    method: Method,
    *,
    seeds: Sequence[int],
    tries: int,
    rounds: int,
    display: Display,
    reached: Callable[[Outcome], str],
    run_once: Callable[[Method, Settings, int, Advance], Run] = Method.run,
) -> Outcome:
    """Tune a method on the first seed, and run it with what was best on all seeds.

    The best is that of the smallest loss at the end of training, on validation data if there are
    such: a loss is smoother than the error, of which small data sets have few values.  As many
    learning rates more are tried while the best is the largest or smallest (see :func:`search`).
    ``reached`` says in words what the method has come to; ``run_once`` makes each run.
    """
    done: list[Run] = []

    def run(settings: dict[str, float], seed: int) -> Run:
        text = ", ".join(f"{name} {value:.3g}" for name, value in settings.items())
        display.begin_run(f"{text}, seed {seed}", rounds)
        return run_once(method, settings, seed, display.advance)

    def loss_at(rate: float) -> float:
        done.append(run({"lr": rate, **variant}, seeds[0]))
        return done[-1].score

    display.begin_method(method.title)
    for variant in method.variants:
        if "lr" in variant:
            loss_at(variant["lr"])
        else:
            search(loss_at, method.start, tries, more=tries)
    best = min(done, key=lambda run: run.score)
    runs = [best]
    if not best.diverged:
        runs += [run(best.settings, seed) for seed in seeds[1:]]
    outcome = Outcome(method.name, method.labels, method.note, done, runs)
    end = "diverged" if outcome.diverged else reached(outcome)
    display.end_method(f"{end}, lr {outcome.settings['lr']:.3g}")
    return outcome
