"""Taking turns, on real ranks, with trainers that only sleep."""

import time
from dataclasses import astuple
from typing import Any

import torch.distributed as dist

from benchmarks.bench import turns
from benchmarks.bench.results import Block
from benchmarks.bench.turns import measure_all_reduce, take_turns
from tests.ranks import RanksOf

# Milliseconds that each rank sleeps in a step.
SLEEPS = (1, 20)
Taken = tuple[list[str], list[list[Block]], int]


class Sleeper:
    """A runner whose steps sleep, and write to ``log``; rank r counts 10 + r bytes per step."""

    def __init__(self, name: str, log: list[str], local_steps: int, slow: bool) -> None:
        self.period = local_steps
        self._name, self._log, self._slow = name, log, slow
        self._steps = 0

    def take(self, steps: int) -> None:
        for _ in range(steps):
            self._log.append(self._name)
            time.sleep(SLEEPS[dist.get_rank()] / 1e3 if self._slow else 0.0)
            self._steps += 1

    def sent(self) -> int:
        return self._steps * (10 + dist.get_rank())


def take(period: int, steps: int, budget: float) -> Taken:
    turns._BUDGET_SECONDS = budget
    log: list[str] = []
    beats: list[int] = []
    runners: Any = [Sleeper("control", log, 1, False), Sleeper("method", log, period, True)]
    blocks = take_turns(runners, runners[1].period, steps, lambda: beats.append(1))
    return log, blocks, len(beats)


def test_whole_periods_in_turn_and_the_slowest_rank_counts(ranks_of: RanksOf) -> None:
    for log, blocks, beats in ranks_of(2).run(take, 3, 7, 1e9):
        assert log == (["control"] * 3 + ["method"] * 3) * 3
        assert beats == 6
        for block in blocks[1]:
            assert block.milliseconds >= max(SLEEPS)
            assert block.counted_bytes == 10.5  # the mean over ranks
    # Every rank has the same figures.
    first, second = (blocks for _, blocks, _ in ranks_of(2).run(take, 1, 2, 1e9))
    assert [astuple(block) for block in first[1]] == [astuple(block) for block in second[1]]


def test_two_periods_are_timed_however_long_they_take(ranks_of: RanksOf) -> None:
    for log, blocks, _ in ranks_of(2).run(take, 4, 400, 0.0):
        assert [len(own) for own in blocks] == [2, 2]
        assert log.count("method") == 8
    for _, blocks, _ in ranks_of(2).run(take, 4, 1, 1e9):
        assert [len(own) for own in blocks] == [2, 2]


def link() -> tuple[float, float]:
    return measure_all_reduce(None), measure_all_reduce(1e6)


def test_the_link_is_measured_alike_by_all(ranks_of: RanksOf) -> None:
    first, second = ranks_of(2).run(link)
    assert first == second
    assert min(first) > 1e6
