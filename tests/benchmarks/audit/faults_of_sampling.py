"""What draws wrongly."""

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch

from benchmarks.audit.stages import Stages
from comm_hooks.optim.private.data.poisson import PoissonSampler
from comm_hooks.optim.private.noise.secret import Secret
from tests.benchmarks.audit.parts import stages_with

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

    def poisson(self, rng: np.random.Generator | None = None) -> Masks:
        drawn: Masks = (rng or self.rng).random(self.num_samples) < self.sample_rate
        return drawn

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


def one_batch(self: Drawing) -> Iterator[Masks]:
    mask = self.poisson()
    while True:
        yield mask


def of_period_9(self: Drawing) -> Iterator[Masks]:
    masks = [self.poisson() for _ in range(9)]
    while True:
        yield from masks


def shuffled(self: Drawing) -> Iterator[Masks]:
    size = max(1, round(self.num_samples * self.sample_rate))
    while True:
        order = self.rng.permutation(self.num_samples)
        for start in range(0, self.num_samples - size + 1, size):
            yield np.isin(np.arange(self.num_samples), order[start : start + size])


def of_one_size(self: Drawing) -> Iterator[Masks]:
    size = max(1, round(self.num_samples * self.sample_rate))
    while True:
        yield self.rng.permutation(self.num_samples) < size


def twice_as_many(self: Drawing) -> Iterator[Masks]:
    while True:
        yield self.poisson() | self.poisson()


def a_tenth_more(self: Drawing) -> Iterator[Masks]:
    while True:
        yield self.rng.random(self.num_samples) < 1.1 * self.sample_rate


def first_sample_always(self: Drawing) -> Iterator[Masks]:
    while True:
        mask = self.poisson()
        mask[0] = True
        yield mask


def more_of_the_last(self: Drawing) -> Iterator[Masks]:
    rates = np.linspace(0.6, 1.4, self.num_samples) * self.sample_rate
    while True:
        yield self.rng.random(self.num_samples) < rates


def all_in_every_tenth(self: Drawing) -> Iterator[Masks]:
    while True:
        for step in range(10):
            yield self.rng.random(self.num_samples) < self.sample_rate * (5 if step == 9 else 0.5)


def windows(self: Drawing) -> Iterator[Masks]:
    size = max(1, round(self.num_samples * self.sample_rate))
    while True:
        yield np.roll(np.arange(self.num_samples) < size, int(self.rng.integers(self.num_samples)))


def in_pairs(self: Drawing) -> Iterator[Masks]:
    while True:
        half = self.poisson()[: (self.num_samples + 1) // 2]
        yield np.repeat(half, 2)[: self.num_samples]


def never_empty(self: Drawing) -> Iterator[Masks]:
    while True:
        mask = self.poisson()
        if not mask.any():
            mask[self.rng.integers(self.num_samples)] = True
        yield mask


def not_twice_in_a_row(self: Drawing) -> Iterator[Masks]:
    last = np.zeros(self.num_samples, dtype=bool)
    while True:
        last = self.poisson() & ~last
        yield last


def sticky(self: Drawing) -> Iterator[Masks]:
    """Half of a batch stays for the next step: a replay buffer."""
    last = self.poisson()
    while True:
        stays = self.rng.random(self.num_samples) < 0.5
        last = np.where(stays, last, self.poisson())
        yield last


def by_the_users_seed(self: Drawing) -> Iterator[Masks]:
    while True:
        yield (torch.rand(self.num_samples) < self.sample_rate).numpy()


def of_16_bits(self: Drawing) -> Iterator[Masks]:
    rng = np.random.default_rng(int(self.rng.integers(1 << 16)))
    while True:
        yield self.poisson(rng)


def the_rest_on_rank_1(self: Drawing) -> Iterator[Masks]:
    """Ranks take from one permutation, so that none draws what another one has."""
    key = self.stages.__dict__.setdefault("key", int(self.rng.integers(1 << 60)))
    step = self.stages.__dict__.setdefault("steps", {})
    while True:
        step[self.number] = step.get(self.number, 0) + 1
        shared = np.random.default_rng([key, step[self.number]]).random(self.num_samples)
        low = self.number * self.sample_rate
        yield (low <= shared) & (shared < low + self.sample_rate)


class Repeating(PoissonSampler):
    """Draws with replacement."""

    def __iter__(self) -> Iterator[list[int]]:
        rng = np.random.default_rng()
        for _ in range(self.steps):
            count = rng.binomial(self.num_samples, self.sample_rate)
            yield rng.integers(0, self.num_samples, count).tolist()


class WithoutEmpty(PoissonSampler):
    """Leaves empty batches out."""

    def __iter__(self) -> Iterator[list[int]]:
        return (batch for batch in super().__iter__() if batch)


class SameMasksOnAllRanks(Stages):
    """Every rank samples by the seed that the user sets, as Opacus does."""

    def sampler(self, rank: int, num_samples: int, steps: int) -> PoissonSampler:
        key = int(torch.randint(1 << 60, ())).to_bytes(8, "little")
        # Another seed in every process: what is repeated is between ranks alone.
        secret = Secret(key + self._process(rank).to_bytes(4, "little"))
        return PoissonSampler(num_samples, self.configuration.sample_rate, steps, secret=secret)

    def _process(self, rank: int) -> int:
        self._starts: dict[int, int] = getattr(self, "_starts", {})
        self._starts[rank] = self._starts.get(rank, 0) + 1
        return self._starts[rank]


class SameMasksAfterRestart(Stages):
    def sampler(self, rank: int, num_samples: int, steps: int) -> PoissonSampler:
        secret = Secret(b"the same in every process")
        rate = self.configuration.sample_rate
        return PoissonSampler(num_samples, rate, steps, secret=secret, rank=rank)


_DRAWS = (
    one_batch,
    of_period_9,
    shuffled,
    of_one_size,
    twice_as_many,
    a_tenth_more,
    first_sample_always,
    more_of_the_last,
    all_in_every_tenth,
    windows,
    in_pairs,
    never_empty,
    not_twice_in_a_row,
    sticky,
    by_the_users_seed,
    of_16_bits,
    the_rest_on_rank_1,
)
FAULTS: dict[str, tuple[dict[str, Any], type[Stages]]] = {
    **{f"sampling: {draw.__name__}": ({}, sampling_by(draw)) for draw in _DRAWS},
    "sampling: with replacement": ({}, stages_with(Repeating)),
    "sampling: empty batches skipped": ({}, stages_with(WithoutEmpty)),
    "sampling: same masks on all ranks": ({}, SameMasksOnAllRanks),
    "sampling: same masks after a restart": ({}, SameMasksAfterRestart),
}
