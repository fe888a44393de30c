"""Timing several methods so that they can be compared: they take turns.

Machines are busy with other things at some times and not at others.  Methods that take turns meet
the same times.
"""

import math
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist

from benchmarks.bench.results import Block
from benchmarks.lab.methods import period_of
from benchmarks.lab.runs import Settings
from benchmarks.lab.tasks import Task
from benchmarks.lab.training import Client, batch_generator, closure_of
from benchmarks.lab.worker import largest

_INTERFACE = "eth0"
_LEAST_BLOCKS = 2
# Rates differ by a factor of 100, and so does the time of a step of all-reduce.
_BUDGET_SECONDS = 20.0

_LINK_SECONDS = 0.25
_LINK_BYTES = (250_000, 32_000_000)


class Runner:
    """A rank's part of a method with batches, which takes steps and counts their bytes."""

    def __init__(self, client: Client, task: Task, settings: Settings, rank: int) -> None:
        self._client = client
        self._task = task
        generator = batch_generator(settings.seed, rank, task.seeds_apart)
        self._batches = task.clients[rank].batches(settings.batch, generator)

    @property
    def period(self) -> int:
        """Steps from one exchange to the next."""
        return period_of(self._client)

    def take(self, steps: int) -> None:
        """Take so many steps."""
        for _ in range(steps):
            batch = next(self._batches)
            self._client.steps.step(closure_of(self._task.loss, self._client.model, batch))

    def sent(self) -> int:
        """Return the bytes that this rank has sent, by the method's own count."""
        return int(self._client.traffic.stats()["bytes_sent"])


def take_turns(
    runners: list[Runner], period: int, steps: int, beat: Callable[[], None]
) -> list[list[Block]]:
    """Time whole periods of each runner in turn. Collective.

    Args:
        runners: the methods.
        period: steps of a turn.
        steps: of each: at least two periods; fewer steps than given where they take long.
        beat: called after each turn.

    Returns:
        The blocks of each runner.
    """
    blocks: list[list[Block]] = [[] for _ in runners]
    spent = 0.0
    for turn in range(max(_LEAST_BLOCKS, math.ceil(steps / period))):
        # All ranks have the same seconds, and so decide the same.
        if turn >= _LEAST_BLOCKS and spent > _BUDGET_SECONDS:
            break
        for own, runner in zip(blocks, runners, strict=True):
            seconds, block = _time_block(runner, period)
            spent += seconds
            own.append(block)
            beat()
    return blocks


def _time_block(runner: Runner, period: int) -> tuple[float, Block]:
    counted = runner.sent()
    crossed = sent_by_interface()
    dist.barrier()
    started = time.perf_counter()
    runner.take(period)
    seconds = largest(time.perf_counter() - started)
    # Read after the collective above: the payloads of the steps have arrived. The bytes of that
    # collective and of the barrier are counted, too, for every runner.
    sent = torch.tensor(
        [sent_by_interface() - crossed, runner.sent() - counted], dtype=torch.float64
    )
    dist.all_reduce(sent)
    by_interface, by_method = (sent / dist.get_world_size() / period).tolist()
    return seconds, Block(1e3 * seconds / period, by_interface, by_method)


def measure_all_reduce(bits_per_second: float | None) -> float:
    """Return the bits per second that an all-reduce moves from each rank. Collective.

    Args:
        bits_per_second: the rate of the link; None: no cap.
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
        fastest = min(fastest, largest(time.perf_counter() - started))
    return 32 * payload.numel() * share / fastest


def sent_by_interface() -> int:
    """Return the bytes that have left this namespace's interface; 0 where there is none."""
    for line in Path("/proc/net/dev").read_text().splitlines():
        name, _, counters = line.partition(":")
        if name.strip() == _INTERFACE:
            return int(counters.split()[8])
    return 0
