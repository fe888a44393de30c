"""Samplers with a fault."""

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch

from benchmarks.audit import Stages
from comm_hooks.optim.private.data.poisson import PoissonSampler
from comm_hooks.optim.private.noise.secret import Secret
from tests.benchmarks.audit.parts import Faults

Masks = np.ndarray[Any, Any]
Draw = Callable[["Drawing"], Iterator[Masks]]


class Drawing(PoissonSampler):
    """Draws by a function that yields one mask per step."""

    draw: Draw

    def __init__(self, stages: Stages, rank: int, num_samples: int, steps: int) -> None:
        super().__init__(num_samples, stages.configuration.sample_rate, steps)
        self.stages = stages
        self.number = rank
        self.rng = np.random.default_rng()
        self.size = max(1, round(num_samples * self.sample_rate))

    def poisson(self, rng: np.random.Generator | None = None, rate: Any = None) -> Masks:
        rate = self.sample_rate if rate is None else rate
        drawn: Masks = (rng or self.rng).random(self.num_samples) < rate
        return drawn

    def shared(self) -> Iterator[np.random.Generator]:
        """Yield the same generators on all ranks."""
        key = self.stages.__dict__.setdefault("key", int(self.rng.integers(1 << 60)))
        step = self.stages.__dict__.setdefault("steps", {})
        while True:
            step[self.number] = step.get(self.number, 0) + 1
            yield np.random.default_rng([key, step[self.number]])

    def __iter__(self) -> Iterator[list[int]]:
        masks = type(self).draw(self)
        for _ in range(self.steps):
            yield np.flatnonzero(next(masks)).tolist()


def sampling_by(draw: Draw) -> type[Stages]:
    class Faulty(Stages):
        def sampler(self, rank: int, num_samples: int, steps: int) -> PoissonSampler:
            kind = type("FaultySampler", (Drawing,), {"draw": staticmethod(draw)})
            made: PoissonSampler = kind(self, rank, num_samples, steps)
            return made

    return Faulty


FAULTS = Faults("sampling", sampling_by)
fault = FAULTS.plant()


@fault
def one_batch(self: Drawing) -> Iterator[Masks]:
    mask = self.poisson()
    while True:
        yield mask


@fault
def of_period_9(self: Drawing) -> Iterator[Masks]:
    masks = [self.poisson() for _ in range(9)]
    while True:
        yield from masks


@fault
def shuffled(self: Drawing) -> Iterator[Masks]:
    while True:
        order = self.rng.permutation(self.num_samples)
        for start in range(0, self.num_samples - self.size + 1, self.size):
            yield np.isin(np.arange(self.num_samples), order[start : start + self.size])


@fault
def dealt_out_by_phases(self: Drawing) -> Iterator[Masks]:
    """Each epoch deals out all samples, in batches of random sizes."""
    period = round(1 / self.sample_rate)
    while True:
        phases = self.rng.integers(period, size=self.num_samples)
        yield from (phases == phase for phase in range(period))


@fault
def of_one_size(self: Drawing) -> Iterator[Masks]:
    while True:
        yield self.rng.permutation(self.num_samples) < self.size


@fault
def twice_as_many(self: Drawing) -> Iterator[Masks]:
    while True:
        yield self.poisson() | self.poisson()


@fault
def a_tenth_more(self: Drawing) -> Iterator[Masks]:
    while True:
        yield self.poisson(rate=1.1 * self.sample_rate)


@fault
def first_sample_always(self: Drawing) -> Iterator[Masks]:
    while True:
        mask = self.poisson()
        mask[0] = True
        yield mask


@fault
def more_of_the_last(self: Drawing) -> Iterator[Masks]:
    while True:
        yield self.poisson(rate=np.linspace(0.6, 1.4, self.num_samples) * self.sample_rate)


@FAULTS.plant(noise_multiplier=0.8, placement="shares")
def rare_class_more_often(self: Drawing) -> Iterator[Masks]:
    """Every eighth sample at 4 q, so that batches have the expected size."""
    is_rare = np.arange(self.num_samples) % 8 == 5
    while True:
        yield self.poisson(rate=self.sample_rate * np.where(is_rare, 4, 4 / 7))


@fault
def all_in_every_tenth(self: Drawing) -> Iterator[Masks]:
    while True:
        for step in range(10):
            yield self.poisson(rate=self.sample_rate * (5 if step == 9 else 0.5))


@fault
def windows(self: Drawing) -> Iterator[Masks]:
    first = np.arange(self.num_samples) < self.size
    while True:
        yield np.roll(first, int(self.rng.integers(self.num_samples)))


@fault
def in_pairs(self: Drawing) -> Iterator[Masks]:
    while True:
        yield np.repeat(self.poisson(), 2)[: self.num_samples]


@FAULTS.plant(sample_rate=0.02)
def sixteen_neighbours_together(self: Drawing) -> Iterator[Masks]:
    while True:
        yield np.repeat(self.poisson(), 16)[: self.num_samples]


@fault
def never_empty(self: Drawing) -> Iterator[Masks]:
    while True:
        mask = self.poisson()
        if not mask.any():
            mask[self.rng.integers(self.num_samples)] = True
        yield mask


@fault
def not_twice_in_a_row(self: Drawing) -> Iterator[Masks]:
    last = np.zeros(self.num_samples, dtype=bool)
    while True:
        last = self.poisson() & ~last
        yield last


@fault
def sticky(self: Drawing) -> Iterator[Masks]:
    """Half of a batch stays for the next step: a replay buffer."""
    last = self.poisson()
    while True:
        stays = self.rng.random(self.num_samples) < 0.5
        last = np.where(stays, last, self.poisson())
        yield last


@FAULTS.plant(sample_rate=0.1)
def same_order_in_every_epoch(self: Drawing) -> Iterator[Masks]:
    """One secret phase of 1 / q: the q T releases of a sample add up."""
    phases = self.rng.integers(round(1 / self.sample_rate), size=self.num_samples)
    while True:
        yield from (phases == phase for phase in range(round(1 / self.sample_rate)))


@fault
def by_the_users_seed(self: Drawing) -> Iterator[Masks]:
    while True:
        yield (torch.rand(self.num_samples) < self.sample_rate).numpy()


@fault
def of_16_bits(self: Drawing) -> Iterator[Masks]:
    rng = np.random.default_rng(int(self.rng.integers(1 << 16)))
    while True:
        yield self.poisson(rng)


@fault
def the_rest_on_rank_1(self: Drawing) -> Iterator[Masks]:
    """Ranks take from one permutation, so that none draws another's samples."""
    for rng in self.shared():
        drawn = rng.random(self.num_samples) - self.number * self.sample_rate
        yield (drawn >= 0) & (drawn < self.sample_rate)


@FAULTS.plant(noise_multiplier=0.5, sample_rate=0.02, world_size=4)
def ranks_turn_one_draw(self: Drawing) -> Iterator[Masks]:
    """Sample i of rank 0 is drawn with i + r of rank r."""
    for rng in self.shared():
        yield np.roll(self.poisson(rng), self.number)


@fault
class WithReplacement(PoissonSampler):
    def __iter__(self) -> Iterator[list[int]]:
        rng = np.random.default_rng()
        for _ in range(self.steps):
            count = rng.binomial(self.num_samples, self.sample_rate)
            yield rng.integers(0, self.num_samples, count).tolist()


@fault
class EmptyBatchesSkipped(PoissonSampler):
    def __iter__(self) -> Iterator[list[int]]:
        return (batch for batch in super().__iter__() if batch)


@fault
class SameMasksOnAllRanks(Stages):
    """Every rank samples by the seed of the user, as Opacus does."""

    def sampler(self, rank: int, num_samples: int, steps: int) -> PoissonSampler:
        # Another seed in every process: only ranks repeat each other.
        self._starts: dict[int, int] = getattr(self, "_starts", {})
        self._starts[rank] = self._starts.get(rank, 0) + 1
        key = int(torch.randint(1 << 60, ())).to_bytes(8, "little")
        secret = Secret(key + self._starts[rank].to_bytes(4, "little"))
        return PoissonSampler(num_samples, self.configuration.sample_rate, steps, secret=secret)


@fault
class SameMasksAfterRestart(Stages):
    def sampler(self, rank: int, num_samples: int, steps: int) -> PoissonSampler:
        secret, rate = Secret(b"the same in every process"), self.configuration.sample_rate
        return PoissonSampler(num_samples, rate, steps, secret=secret, rank=rank)
