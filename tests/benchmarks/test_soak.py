"""A short soak, and what it would say of a leak."""

from collections.abc import Callable
from dataclasses import replace

import pytest

from benchmarks.soak import METHODS, Count, train
from tests.ranks import Ranks

NOW = Count(rss=400_000_000, descriptors=13, threads=5, objects=300_000)


@pytest.mark.slow
@pytest.mark.parametrize("method", METHODS)
def test_nothing_grows(method: str, ranks_of: Callable[[int], Ranks]) -> None:
    for counts in ranks_of(2).run(train, method, 100):
        early, late = (Count(*count) for count in counts)
        # A run as short as this is no measure of memory, which is taken in large pieces.
        assert not replace(late, rss=early.rss).grew(early)


@pytest.mark.parametrize(
    ("late", "grew"),
    [
        (NOW, False),
        (replace(NOW, rss=407_000_000, objects=300_040), False),
        (replace(NOW, rss=409_000_000), True),
        (replace(NOW, rss=391_000_000), True),
        (replace(NOW, descriptors=14), True),
        (replace(NOW, threads=6), True),
        (replace(NOW, descriptors=12, threads=4, objects=299_000), False),
        (replace(NOW, objects=300_041), True),
    ],
)
def test_a_leak_is_told(late: Count, grew: bool) -> None:
    assert late.grew(NOW) == grew
