"""What checking costs is measured by clocks that do not count twice."""

import time
from collections.abc import Callable

import pytest
import torch

from benchmarks.checks import CHECKS, Clock, measure, timed_checks
from benchmarks.lab.model import GPTConfig
from benchmarks.lab.runs import Settings
from comm_hooks.wire.gathered_header import GatheredHeader
from comm_hooks.wire.stamp import Stamp
from tests.ranks import Ranks


def busy(seconds: float) -> None:
    until = time.thread_time() + seconds
    while time.thread_time() < until:
        pass


def test_what_one_check_calls_is_counted_once() -> None:
    clock = Clock()
    inner = clock.around(lambda: busy(0.02), "inner")

    def outer() -> None:
        busy(0.01)
        inner()

    clock.around(outer, "outer")()
    assert clock.seconds["inner"] == pytest.approx(0.02, rel=0.2)
    assert clock.seconds["outer"] == pytest.approx(0.01, rel=0.2)


def test_clocks_are_put_around_and_taken_away() -> None:
    before = GatheredHeader.write_
    with timed_checks() as clock:
        payload = torch.zeros(1, 64, dtype=torch.uint8)
        GatheredHeader(range(1), 0).write_(payload, Stamp(1, 2), torch.tensor(0.0))
    assert GatheredHeader.write_ is before
    assert set(clock.seconds) == {"headers", "checksums"}
    assert min(clock.seconds.values()) > 0


@pytest.mark.slow
def test_shares_of_a_step(ranks_of: Callable[[int], Ranks]) -> None:
    settings = Settings(nproc=2, batch=2, model=GPTConfig(layers=1, width=16, context=16))
    for found in ranks_of(2).run(measure, "topk", settings, 32):
        checks = {name: found[name] for name in CHECKS}
        assert min(checks.values()) > 0
        assert sum(checks.values()) < found["step"]
