"""Timing several trainers so that they can be compared: they take turns.

Machines are busy with other things at some times and not at others.  Methods that take turns meet
the same times.
"""

import math
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from benchmarks.bench.results import Block
from benchmarks.lab.clock import slowest
from benchmarks.lab.optimizers import Trainer
from benchmarks.lab.training import closure_of

_INTERFACE = "eth0"
_LEAST_BLOCKS = 2
# Rates differ by a factor of 100, and so does the time of a step of all-reduce.
_BUDGET_SECONDS = 20.0

_LINK_SECONDS = 0.25
_LINK_BYTES = (250_000, 32_000_000)


@dataclass
class Runner:
    """A trainer with its batches, which counts the steps it has taken."""

    trainer: Trainer
    batches: Iterator[Tensor]
    steps: int = field(default=0)

    @property
    def period(self) -> int:
        """Steps from one exchange to the next."""
        return getattr(self.trainer.optimizer, "local_steps", 1)

    def take(self, steps: int) -> None:
        """Take so many steps."""
        for _ in range(steps):
            self.trainer.optimizer.step(closure_of(self.trainer, next(self.batches)))
            self.steps += 1


def take_turns(
    runners: list[Runner], period: int, steps: int, beat: Callable[[], None]
) -> list[list[Block]]:
    """Time whole periods of each runner in turn. Collective.

    Args:
        runners: what to time.
        period: steps of a turn.
        steps: to take with each: at least two periods, and fewer than these where that takes long.
        beat: called after each turn.

    Returns:
        The blocks of each runner.
    """
    blocks: list[list[Block]] = [[] for _ in runners]
    spent = 0.0
    for turn in range(max(_LEAST_BLOCKS, math.ceil(steps / period))):
        # All ranks have the same seconds, and so decide alike.
        if turn >= _LEAST_BLOCKS and spent > _BUDGET_SECONDS:
            break
        for own, runner in zip(blocks, runners, strict=True):
            seconds, block = _time_block(runner, period)
            spent += seconds
            own.append(block)
            beat()
    return blocks


def _time_block(runner: Runner, period: int) -> tuple[float, Block]:
    counted = runner.trainer.traffic(runner.steps)[0]
    crossed = sent_by_interface()
    dist.barrier()
    started = time.perf_counter()
    runner.take(period)
    seconds = slowest(time.perf_counter() - started)
    # Read after the collective above: nothing of the steps is on its way any more.  What that and
    # the barrier send is counted, for every runner alike.
    sent = torch.tensor(
        [
            sent_by_interface() - crossed,
            runner.trainer.traffic(runner.steps)[0] - counted,
        ],
        dtype=torch.float64,
    )
    dist.all_reduce(sent)
    by_interface, by_method = (sent / dist.get_world_size() / period).tolist()
    return seconds, Block(1e3 * seconds / period, by_interface, by_method)


def measure_all_reduce(bits_per_second: float | None) -> float:
    """Return the bits per second that an all-reduce moves from each rank. Collective.

    Args:
        bits_per_second: what the link should give; None: as much as there is.
    """
    least, most = _LINK_BYTES
    wanted = math.inf if bits_per_second is None else bits_per_second / 8 * _LINK_SECONDS
    payload = torch.ones(int(min(most, max(least, wanted))) // 4)
    share = 2 * (dist.get_world_size() - 1) / dist.get_world_size()
    fastest = math.inf
    for _ in range(2):
        dist.barrier()
        started = time.perf_counter()
        dist.all_reduce(payload)
        fastest = min(fastest, slowest(time.perf_counter() - started))
    return 32 * payload.numel() * share / fastest


def sent_by_interface() -> int:
    """Return the bytes that have left this namespace's interface; 0 where there is none."""
    for line in Path("/proc/net/dev").read_text().splitlines():
        name, _, counters = line.partition(":")
        if name.strip() == _INTERFACE:
            return int(counters.split()[8])
    return 0
