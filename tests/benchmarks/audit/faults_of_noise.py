"""Mechanisms with a fault in their noise."""

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from benchmarks.audit import Stages
from benchmarks.audit.configuration import Mechanism
from comm_hooks.collectives.requests import AllGatherObject, Round
from comm_hooks.exchange import Exchange
from comm_hooks.optim.private.noise.gaussian import add_noise_
from comm_hooks.optim.private.noise.mechanism import GaussianMechanism, Released
from comm_hooks.optim.private.noise.secret import Secret, Stream
from tests.benchmarks.audit.parts import MASK, TOPK, Faults, library_mechanism

Values = np.ndarray[Any, Any]
Draw = Callable[["OwnNoise", Values], Values]


class OwnNoise:
    """Adds noise on rank 0 by a function; unit variance."""

    def __init__(self, exchange: Exchange, std: float, divisor: float, draw: Draw) -> None:
        self._exchange, self._std, self._divisor, self._draw = exchange, std, divisor, draw
        self.rng = np.random.default_rng()
        self.key = int(self.rng.integers(1 << 60))
        self.step = 0
        self.memory: Any = None
        self.numels: list[int] = []

    def again(self, number: int) -> np.random.Generator:
        """Return a generator that has been seen before."""
        return np.random.default_rng([self.key, number])

    def normal(self, flat: Values) -> Values:
        return self.rng.standard_normal(len(flat))

    def round(self, sums: Mapping[str, torch.Tensor]) -> Round[Released]:
        transport = self._exchange.transport
        tensors = {name: t.clone() for name, t in sums.items()}
        self.numels = [t.numel() for t in tensors.values()]
        if transport.rank == 0:
            flat = torch.cat([t.flatten() for t in tensors.values()]).numpy()
            noise = torch.from_numpy(np.asarray(self._draw(self, flat) * self._std)).float()
            for tensor, part in zip(tensors.values(), noise.split(self.numels), strict=True):
                tensor += part.view(tensor.shape)
        self.step += 1
        yield from self._exchange.round(tensors)
        for tensor in tensors.values():
            tensor *= transport.world_size / self._divisor
        return Released(tensors, None)


def noise_by(draw: Draw) -> type[Stages]:
    class Faulty(Stages):
        def mechanism(self, exchange: Exchange, noise_multiplier: float) -> Mechanism:
            configuration = self.configuration
            std = noise_multiplier * configuration.max_grad_norm
            return OwnNoise(exchange, std, configuration.expected_batch_size, draw)

    return Faulty


FAULTS = Faults("noise", noise_by)


def _differences(self: OwnNoise, flat: Values) -> Values:
    """w_t - 0.95 w_(t-1): adding up releases takes most of it back."""
    before = self.memory if self.memory is not None else self.normal(flat)
    self.memory = self.normal(flat)
    return (self.memory - 0.95 * before) / np.sqrt(1 + 0.95**2)


def _in_a_subspace(self: OwnNoise, flat: Values) -> Values:
    """256 dimensions."""
    if self.memory is None or self.memory.shape[1] != len(flat):
        self.memory = np.random.default_rng(1).standard_normal((256, len(flat))) / 16
    return self.rng.standard_normal(256) @ self.memory


def _of_16_bits(self: OwnNoise, flat: Values) -> Values:
    if self.memory is None:
        self.memory = np.random.default_rng(self.key & 0xFFFF)
    return self.memory.standard_normal(len(flat))


def _the_same_for_parameters(self: OwnNoise, flat: Values) -> Values:
    seed = int(self.rng.integers(1 << 60))
    return np.concatenate([np.random.default_rng(seed).standard_normal(n) for n in self.numels])


# 256 values, of the right variance
_TABLE = torch.erfinv(torch.arange(-255, 256, 2, dtype=torch.float64) / 256).numpy()
_TABLE /= _TABLE.std()

DRAWS: dict[str, Draw] = {
    "of_period_97": lambda self, flat: self.again(self.step % 97).standard_normal(len(flat)),
    # antithetic: the sum of two steps is clean
    "negated": lambda self, flat: (
        self.again(self.step // 2).standard_normal(len(flat)) * (-1) ** self.step
    ),
    "differences": _differences,
    "ends_after_100": lambda self, flat: self.normal(flat) * (self.step < 100),
    "not_for_empty_batches": lambda self, flat: self.normal(flat) * flat.any(),
    "of_the_size_of_sums": lambda self, flat: (
        self.normal(flat) * max(1.0, float(np.linalg.norm(flat)) / 50)
    ),
    "not_at_the_end": lambda self, flat: self.normal(flat) * (np.arange(len(flat)) < len(flat) - 1),
    "small_beyond_the_first_piece": lambda self, flat: (
        self.normal(flat) * np.where(np.arange(len(flat)) < 1 << 16, 1, 0.5)
    ),
    "one_for_each_parameter": lambda self, flat: np.repeat(
        self.rng.standard_normal(len(self.numels)), self.numels
    ),
    "the_same_for_parameters": _the_same_for_parameters,
    "in_a_subspace": _in_a_subspace,
    "cut_at_3": lambda self, flat: self.normal(flat).clip(-3, 3),
    "laplace": lambda self, flat: self.rng.laplace(0, np.sqrt(0.5), len(flat)),
    "rounded": lambda self, flat: np.rint(self.normal(flat) * 16) / 16,
    "out_of_a_table": lambda self, flat: self.rng.choice(_TABLE, len(flat)),
    "of_16_bits": _of_16_bits,
    "of_the_users_seed": lambda self, flat: torch.randn(len(flat)).numpy(),
    "with_the_signs_of_sums": lambda self, flat: np.where(
        flat != 0, np.abs(self.normal(flat)) * np.sign(flat), self.normal(flat)
    ),
}
FAULTS.plant_all(DRAWS, world_size=1)


@FAULTS.plant()
class Replayed(Stages):
    """The key follows from a seed, so that a resumed run adds the same noise again."""

    def mechanism(self, exchange: Exchange, noise_multiplier: float) -> Mechanism:
        seed = int(torch.initial_seed()).to_bytes(8, "little")
        return library_mechanism(self, exchange, noise_multiplier, secret=Secret(seed))


@FAULTS.plant(world_size=3, exchange=TOPK)
class OneRankRestoredFromASnapshot(Stages):
    """Rank 1 adds the same noise in every process: releases of its shard differ in the clear."""

    def mechanism(self, exchange: Exchange, noise_multiplier: float) -> Mechanism:
        secret = Secret(b"of a snapshot") if exchange.transport.rank == 1 else None
        return library_mechanism(self, exchange, noise_multiplier, secret=secret)


@FAULTS.plant(placement="shares", world_size=3)
class SameOnAllRanks(Stages):
    """Ranks share a secret and forget their numbers: two messages differ by no noise."""

    def mechanism(self, exchange: Exchange, noise_multiplier: float) -> Mechanism:
        if exchange.transport.rank == 0:
            self._shared = Secret()
        return library_mechanism(
            self, exchange, noise_multiplier, kind=_OfRankZero, secret=self._shared
        )


class _OfRankZero(GaussianMechanism):
    def _stream(self, purpose: str) -> Stream:
        return self._secret.stream(purpose, rank=0, step=self._step)


@FAULTS.plant(placement="shares", world_size=4, exchange=MASK)
class CancelsInTheSum(GaussianMechanism):
    """Each rank has its share of variance, as masks n_r - n_(r+1), of sum 0 over ranks."""

    _of_all: Secret | None = None

    def round(self, sums: Mapping[str, torch.Tensor]) -> Round[Released]:
        if self._of_all is None:
            yield from self.exchange.agree()
            parts = yield AllGatherObject(os.urandom(32).hex())
            self._of_all = Secret(bytes.fromhex("".join(parts)))
        return (yield from super().round(sums))

    def _add_noise_(
        self, tensors: Sequence[torch.Tensor], sensitivity: float, elements: int, stream: Stream
    ) -> None:
        assert self._of_all is not None
        transport = self.exchange.transport
        next_rank = (transport.rank + 1) % transport.world_size
        std = self._std(sensitivity, elements) / 2**0.5
        for rank, sign in ((transport.rank, 1), (next_rank, -1)):
            noise = [torch.zeros_like(t) for t in tensors]
            add_noise_(noise, std, self._of_all.stream("mask", rank=rank, step=self._step))
            torch._foreach_add_(list(tensors), noise, alpha=sign)


@FAULTS.plant(placement="local")
class Half(Stages):
    """Half of the claim."""

    def mechanism(self, exchange: Exchange, noise_multiplier: float) -> Mechanism:
        return super().mechanism(exchange, noise_multiplier / 2)


@FAULTS.plant(placement="shares", world_size=3)
class NoneOnTheLastRank(Stages):
    """The last rank adds next to nothing."""

    def mechanism(self, exchange: Exchange, noise_multiplier: float) -> Mechanism:
        mechanism = library_mechanism(self, exchange, noise_multiplier)
        if exchange.transport.rank == exchange.transport.world_size - 1:
            mechanism._std = lambda sensitivity, elements: 1e-9  # type: ignore[method-assign]
        return mechanism


@FAULTS.plant()
class TwiceTheVarianceSaid(GaussianMechanism):
    """Reports the variance as if noise were added on every rank."""

    def round(self, sums: Mapping[str, torch.Tensor]) -> Round[Released]:
        released = yield from super().round(sums)
        return replace(released, noise_variance=2 * (released.noise_variance or 0))
