"""Samplers with a fault."""

from collections.abc import Callable, Iterator
from itertools import count
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
        self.drawn = 0
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


def _again(period: int) -> Draw:
    def draw(self: Drawing) -> Iterator[Masks]:
        masks = [self.poisson() for _ in range(period)]
        while True:
            yield from masks

    return draw


def _shuffled(self: Drawing) -> Iterator[Masks]:
    while True:
        order = self.rng.permutation(self.num_samples)
        for start in range(0, self.num_samples - self.size + 1, self.size):
            yield np.isin(np.arange(self.num_samples), order[start : start + self.size])


def _phases(*, fresh: bool) -> Draw:
    """Each epoch deals out all samples, in batches of random sizes, by fresh phases or not."""

    def draw(self: Drawing) -> Iterator[Masks]:
        period = round(1 / self.sample_rate)
        phases = self.rng.integers(period, size=self.num_samples)
        while True:
            yield from (phases == phase for phase in range(period))
            if fresh:
                phases = self.rng.integers(period, size=self.num_samples)

    return draw


def _not_twice_in_a_row(self: Drawing) -> Iterator[Masks]:
    last = np.zeros(self.num_samples, dtype=bool)
    while True:
        last = self.poisson() & ~last
        yield last


def _sticky(self: Drawing) -> Iterator[Masks]:
    """Half of a batch stays for the next step: a replay buffer."""
    last = self.poisson()
    while True:
        last = np.where(self.rng.random(self.num_samples) < 0.5, last, self.poisson())
        yield last


def _of_16_bits(self: Drawing) -> Iterator[Masks]:
    rng = np.random.default_rng(int(self.rng.integers(1 << 16)))
    while True:
        yield self.poisson(rng)


def _the_rest_on_rank_1(self: Drawing) -> Iterator[Masks]:
    """Ranks take from one permutation, so that none draws another's samples."""
    for rng in self.shared():
        drawn = rng.random(self.num_samples) - self.number * self.sample_rate
        yield (drawn >= 0) & (drawn < self.sample_rate)


def _every_step(mask: Callable[[Drawing], Masks]) -> Draw:
    def draw(self: Drawing) -> Iterator[Masks]:
        while True:
            self.drawn += 1
            yield mask(self)

    return draw


# Every eighth sample at 4 q, so that batches have the expected size.
_RARE = np.array([4 if i % 8 == 5 else 4 / 7 for i in range(1 << 16)])

MASKS: dict[str, Callable[[Drawing], Masks]] = {
    "of_one_size": lambda self: self.rng.permutation(self.num_samples) < self.size,
    "a_tenth_more": lambda self: self.poisson(rate=1.1 * self.sample_rate),
    "more_of_the_last": lambda self: self.poisson(
        rate=np.linspace(0.6, 1.4, self.num_samples) * self.sample_rate
    ),
    "in_pairs": lambda self: np.repeat(self.poisson(), 2)[: self.num_samples],
    "never_empty": lambda self: next(m for _ in count() if (m := self.poisson()).any()),
    "by_the_users_seed": lambda self: (torch.rand(self.num_samples) < self.sample_rate).numpy(),
}
DRAWS: dict[str, Draw] = {
    **{name: _every_step(mask) for name, mask in MASKS.items()},
    "one_batch": _again(1),
    "shuffled": _shuffled,
    "dealt_out_by_phases": _phases(fresh=True),
    "not_twice_in_a_row": _not_twice_in_a_row,
    "sticky": _sticky,
    "of_16_bits": _of_16_bits,
    "the_rest_on_rank_1": _the_rest_on_rank_1,
}
FAULTS = Faults("sampling", sampling_by)
FAULTS.plant_all(DRAWS)
fault = FAULTS.plant()


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
            size = rng.binomial(self.num_samples, self.sample_rate)
            yield rng.integers(0, self.num_samples, size).tolist()


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
