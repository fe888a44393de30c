"""A search for two random streams of private training that are equal.

Derives the keys and starting points of ten million streams from one secret, over purposes, ranks
and steps as training does, and fails if two keys or two starting points are the same, or if two
streams begin with the same number.  (Of 64 bits each, two of a million first numbers would be the
same by chance in one run of 37 million.)
"""

import itertools
import time
from collections.abc import Iterator

import numpy as np

from benchmarks.micro.timing import print_head
from comm_hooks.optim.private import Secret

_PURPOSES = ("noise", "sampling", "mask", "clients")
_RANKS = 25
_LOW = (1 << 64) - 1


def main(streams: int = 10_000_000) -> bool:
    """Print how many are equal; return whether any are."""
    secret = Secret()
    labels = itertools.islice(every_label(), streams)
    start = time.perf_counter()
    seeds = np.empty((streams, 4), dtype=np.uint64)
    first = np.empty(streams // 10, dtype=np.uint64)
    for place, (step, purpose, rank) in enumerate(labels):
        key, begin = secret.seeds(f"{len(purpose)} {purpose} {rank} {step} 0")
        seeds[place] = (key >> 64, key & _LOW, begin >> 64, begin & _LOW)
        if place % 10 == 0:
            stream = secret.stream(purpose, rank=rank, step=step)
            first[place // 10] = stream.generator().integers(1 << 64, dtype=np.uint64)
    seconds = time.perf_counter() - start
    alike = {
        "keys": streams - distinct(seeds[:, :2]),
        "starting points": streams - distinct(seeds[:, 2:]),
        "first numbers, of every tenth": len(first) - len(np.unique(first)),
    }
    print(f"\n{streams:,} streams of one secret, {seconds:.0f} s.\n")
    print_head("", "equal")
    for name, count in alike.items():
        print(f"| {name} | {count} |")
    return any(alike.values())


def every_label() -> Iterator[tuple[int, str, int]]:
    """Yield steps, purposes and ranks without end, in the order of a training."""
    for step in itertools.count():
        for purpose, rank in itertools.product(_PURPOSES, range(_RANKS)):
            yield step, purpose, rank


def distinct(pairs: np.ndarray) -> int:
    """Return how many different rows there are of (n, 2) numbers."""
    order = np.lexsort((pairs[:, 1], pairs[:, 0]))
    rows = pairs[order]
    return 1 + int((rows[1:] != rows[:-1]).any(1).sum())
