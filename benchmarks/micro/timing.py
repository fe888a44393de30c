"""Times of actions that take turns, so that other load on the machine slows all of them."""

import statistics
import time
from collections.abc import Callable, Hashable, Mapping
from typing import TypeVar

Name = TypeVar("Name", bound=Hashable)


def times_in_turns(
    actions: Mapping[Name, Callable[[], object]],
    rounds: int,
    clock: Callable[[], float] = time.perf_counter,
    warm_up: int = 0,
) -> dict[Name, list[float]]:
    """Return the milliseconds of each action in each round, without ``warm_up`` rounds before."""
    times: dict[Name, list[float]] = {name: [] for name in actions}
    for turn in range(-warm_up, rounds):
        for name, action in actions.items():
            start = clock()
            action()
            if turn >= 0:
                times[name].append(1e3 * (clock() - start))
    return times


def medians(times: Mapping[Name, list[float]]) -> dict[Name, float]:
    """Return the median time of each action."""
    return {name: statistics.median(measured) for name, measured in times.items()}


def print_head(*columns: str) -> None:
    """Print the head of a Markdown table."""
    print(f"| {' | '.join(columns)} |\n|{'---|' * len(columns)}", flush=True)
