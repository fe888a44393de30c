"""What adds noise wrongly."""

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from benchmarks.audit.stages import Mechanism, Stages
from comm_hooks.collectives.requests import Round
from comm_hooks.exchange import Exchange
from comm_hooks.optim.private.noise.gaussian import add_noise_
from comm_hooks.optim.private.noise.mechanism import Released
from comm_hooks.optim.private.noise.secret import Secret
from tests.benchmarks.audit.parts import library_mechanism

Values = np.ndarray[Any, Any]
Draw = Callable[["OwnNoise", Values], Values]


class OwnNoise:
    """Adds noise on the rank that owns all of the vector, by a function; unit variance."""

    def __init__(self, exchange: Exchange, std: float, divisor: float, draw: Draw) -> None:
        self._exchange = exchange
        self._std = std
        self._divisor = divisor
        self._draw = draw
        self.rng = np.random.default_rng()
        self.key = int(self.rng.integers(1 << 60))
        self.step = 0
        self.memory: Any = None
        self.numels: list[int] = []

    def again(self, number: int) -> np.random.Generator:
        """Return a generator that has been seen before."""
        return np.random.default_rng([self.key, number])

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


def correct(self: OwnNoise, flat: Values) -> Values:
    return self.rng.standard_normal(len(flat))


def of_period_3(self: OwnNoise, flat: Values) -> Values:
    return self.again(self.step % 3).standard_normal(len(flat))


def of_period_97(self: OwnNoise, flat: Values) -> Values:
    return self.again(self.step % 97).standard_normal(len(flat))


def negated(self: OwnNoise, flat: Values) -> Values:
    """Antithetic: the sum of two steps is clean."""
    return self.again(self.step // 2).standard_normal(len(flat)) * (-1) ** self.step


def differences(self: OwnNoise, flat: Values) -> Values:
    fresh = self.rng.standard_normal(len(flat))
    before = self.memory if self.memory is not None else self.rng.standard_normal(len(flat))
    self.memory = fresh
    return (fresh - before) / np.sqrt(2)


def ends_after_100(self: OwnNoise, flat: Values) -> Values:
    return correct(self, flat) * (self.step < 100)


def not_in_every_fifth(self: OwnNoise, flat: Values) -> Values:
    return correct(self, flat) * (self.step % 5 != 4)


def not_for_empty_batches(self: OwnNoise, flat: Values) -> Values:
    return correct(self, flat) * flat.any()


def of_the_size_of_sums(self: OwnNoise, flat: Values) -> Values:
    return correct(self, flat) * max(1.0, float(np.linalg.norm(flat)) / 50)


def too_small_by_a_fifth(self: OwnNoise, flat: Values) -> Values:
    return 0.8 * correct(self, flat)


def not_at_the_end(self: OwnNoise, flat: Values) -> Values:
    noise = correct(self, flat)
    noise[-1] = 0
    return noise


def small_beyond_the_first_piece(self: OwnNoise, flat: Values) -> Values:
    noise = correct(self, flat)
    noise[1 << 16 :] *= 0.5
    return noise


def not_for_scalars(self: OwnNoise, flat: Values) -> Values:
    noise = correct(self, flat)
    start = 0
    for numel in self.numels:
        noise[start : start + numel] *= numel > 1
        start += numel
    return noise


def one_for_each_parameter(self: OwnNoise, flat: Values) -> Values:
    return np.repeat(self.rng.standard_normal(len(self.numels)), self.numels)


def the_same_for_parameters(self: OwnNoise, flat: Values) -> Values:
    seed = int(self.rng.integers(1 << 60))
    return np.concatenate([np.random.default_rng(seed).standard_normal(n) for n in self.numels])


def in_pieces_of_512(self: OwnNoise, flat: Values) -> Values:
    return np.resize(self.rng.standard_normal(512), len(flat))


def in_a_subspace(self: OwnNoise, flat: Values) -> Values:
    basis = np.random.default_rng(1).standard_normal((40, len(flat))) / np.sqrt(40)
    found: Values = self.rng.standard_normal(40) @ basis
    return found


def permuted(self: OwnNoise, flat: Values) -> Values:
    if self.memory is None or len(self.memory) != len(flat):
        self.memory = correct(self, flat)
    return self.rng.permutation(self.memory)


def cut_at_3(self: OwnNoise, flat: Values) -> Values:
    return correct(self, flat).clip(-3, 3)


def uniform(self: OwnNoise, flat: Values) -> Values:
    return self.rng.uniform(-np.sqrt(3), np.sqrt(3), len(flat))


def laplace(self: OwnNoise, flat: Values) -> Values:
    return self.rng.laplace(0, np.sqrt(0.5), len(flat))


def rounded(self: OwnNoise, flat: Values) -> Values:
    return np.rint(correct(self, flat) * 16) / 16


def of_16_bits(self: OwnNoise, flat: Values) -> Values:
    if self.memory is None:
        self.memory = np.random.default_rng(self.key & 0xFFFF)
    found: Values = self.memory.standard_normal(len(flat))
    return found


def of_the_users_seed(self: OwnNoise, flat: Values) -> Values:
    return torch.randn(len(flat)).numpy()


def of_numpys_seed(self: OwnNoise, flat: Values) -> Values:
    return np.random.standard_normal(len(flat))


def with_the_signs_of_sums(self: OwnNoise, flat: Values) -> Values:
    noise = correct(self, flat)
    return np.where(flat != 0, np.abs(noise) * np.sign(flat), noise)


class ReplayedNoise(Stages):
    """The key follows from a seed, so that a resumed run adds the same noise again."""

    def mechanism(self, exchange: Exchange, noise_multiplier: float) -> Mechanism:
        seed = int(torch.initial_seed()).to_bytes(8, "little")
        return library_mechanism(self, exchange, noise_multiplier, secret=Secret(seed))


class SameNoiseOnAllRanks(Stages):
    """Ranks share a secret and forget their numbers: what two send differs by no noise."""

    def mechanism(self, exchange: Exchange, noise_multiplier: float) -> Mechanism:
        if exchange.transport.rank == 0:
            self._shared = Secret()
        configuration = self.configuration
        std = noise_multiplier * configuration.max_grad_norm
        return _Shares(exchange, std, configuration.expected_batch_size, self._shared)


class _Shares:
    def __init__(self, exchange: Exchange, std: float, divisor: float, secret: Secret) -> None:
        self._exchange = exchange
        self._std = std / exchange.transport.world_size**0.5
        self._divisor = divisor
        self._secret = secret
        self._step = 0

    def round(self, sums: Mapping[str, torch.Tensor]) -> Round[Released]:
        self._step += 1
        tensors = {name: t.clone() for name, t in sums.items()}
        stream = self._secret.stream("noise", rank=0, step=self._step)
        add_noise_(list(tensors.values()), self._std, stream)
        yield from self._exchange.round(tensors)
        for tensor in tensors.values():
            tensor *= self._exchange.transport.world_size / self._divisor
        return Released(tensors, None)


class TooLittleNoise(Stages):
    """Half of what is claimed."""

    def mechanism(self, exchange: Exchange, noise_multiplier: float) -> Mechanism:
        return super().mechanism(exchange, noise_multiplier / 2)


class NoShareOnLastRank(Stages):
    """The last rank adds next to nothing."""

    def mechanism(self, exchange: Exchange, noise_multiplier: float) -> Mechanism:
        last = exchange.transport.rank == exchange.transport.world_size - 1
        mechanism = library_mechanism(self, exchange, noise_multiplier)
        if last:
            mechanism._std = lambda sensitivity, elements: 1e-9  # type: ignore[method-assign]
        return mechanism


class WrongVariance(Stages):
    """Reports the variance as if noise were added on every rank."""

    def mechanism(self, exchange: Exchange, noise_multiplier: float) -> Mechanism:
        return _Misreporting(super().mechanism(exchange, noise_multiplier))


class _Misreporting:
    def __init__(self, inner: Mechanism) -> None:
        self._inner = inner

    def round(self, sums: Mapping[str, torch.Tensor]) -> Round[Released]:
        released = yield from self._inner.round(sums)
        return replace(released, noise_variance=2 * (released.noise_variance or 0))


_DRAWS = (
    of_period_3,
    of_period_97,
    negated,
    differences,
    ends_after_100,
    not_in_every_fifth,
    not_for_empty_batches,
    of_the_size_of_sums,
    too_small_by_a_fifth,
    not_at_the_end,
    small_beyond_the_first_piece,
    not_for_scalars,
    one_for_each_parameter,
    the_same_for_parameters,
    in_pieces_of_512,
    in_a_subspace,
    permuted,
    cut_at_3,
    uniform,
    laplace,
    rounded,
    of_16_bits,
    of_the_users_seed,
    of_numpys_seed,
    with_the_signs_of_sums,
)
FAULTS: dict[str, tuple[dict[str, Any], type[Stages]]] = {
    **{f"noise: {d.__name__}": ({"world_size": 1}, noise_by(d)) for d in _DRAWS},
    "noise: replayed": ({}, ReplayedNoise),
    "noise: same on all ranks": ({"placement": "shares", "world_size": 3}, SameNoiseOnAllRanks),
    "noise: half": ({"placement": "local"}, TooLittleNoise),
    "noise: no share on the last rank": (
        {"placement": "shares", "world_size": 3},
        NoShareOnLastRank,
    ),
    "noise: twice the variance said": ({}, WrongVariance),
    "noise: none on the last rank": ({"placement": "local", "world_size": 3}, NoShareOnLastRank),
}
