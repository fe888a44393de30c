"""Mechanisms that keep or release clean sums."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from benchmarks.audit import Stages
from benchmarks.audit.configuration import Mechanism
from comm_hooks.collectives.base import Transport
from comm_hooks.collectives.requests import Round
from comm_hooks.exchange import Exchange
from comm_hooks.memory import ErrorFeedback
from comm_hooks.optim.private.noise.gaussian import add_noise_
from comm_hooks.optim.private.noise.mechanism import GaussianMechanism, Released
from comm_hooks.optim.private.noise.secret import Secret
from tests.benchmarks.audit.parts import MASK, TOPK, Faults

Tensors = dict[str, torch.Tensor]
Alter = Callable[["Altered", Tensors], Tensors]


class Altered:
    """A mechanism that changes its sums by a function with a memory."""

    def __init__(self, stages: Stages, inner: Mechanism, exchange: Exchange, alter: Alter) -> None:
        self._inner, self._alter, self.stages = inner, alter, stages
        self.rank = exchange.transport.rank
        self.step = 0
        self.memory: Any = None

    def round(self, sums: Mapping[str, torch.Tensor]) -> Round[Released]:
        altered = self._alter(self, {name: t.clone() for name, t in sums.items()})
        self.step += 1
        return (yield from self._inner.round(altered))


def altered_by(alter: Alter) -> type[Stages]:
    class Faulty(Stages):
        def mechanism(self, exchange: Exchange, noise_multiplier: float) -> Mechanism:
            inner = super().mechanism(exchange, noise_multiplier)
            return Altered(self, inner, exchange, alter)

    return Faulty


FAULTS = Faults("memory", altered_by)


def _plus(one: Tensors, other: Tensors | None, factor: float = 1.0) -> Tensors:
    if other is None:
        return one
    return {name: t + factor * other[name] for name, t in one.items()}


@FAULTS.plant(placement="local")
def leaks_a_twentieth(self: Altered, sums: Tensors) -> Tensors:
    given = _plus(sums, self.memory)
    # The smaller half of each tensor is held back, for later steps.
    is_sent = {n: t.abs() >= t.abs().median() for n, t in given.items()}
    self.memory = {n: 0.05 * t * ~is_sent[n] for n, t in given.items()}
    return {n: t * is_sent[n] for n, t in given.items()}


@FAULTS.plant(exchange=MASK)
def last_sum_again(self: Altered, sums: Tensors) -> Tensors:
    given, self.memory = _plus(sums, self.memory), sums
    return given


@FAULTS.plant(placement="shares")
def after_20_steps(self: Altered, sums: Tensors) -> Tensors:
    given = _plus(sums, self.memory, 0.5) if self.step > 20 else sums
    self.memory = sums
    return given


@FAULTS.plant(world_size=1)
def of_large_sums(self: Altered, sums: Tensors) -> Tensors:
    """A global clip holds back the excess of large sums alone, for later."""
    norm = float(torch.cat([t.flatten() for t in sums.values()]).norm())
    given = _plus(sums, self.memory)
    self.memory = {n: 0.1 * t for n, t in sums.items()} if norm > 5 else None
    return given


@FAULTS.plant()
def after_a_restart(self: Altered, sums: Tensors) -> Tensors:
    """A checkpoint of the clean sums is added again by the process that loads it."""
    saved: dict[int, Tensors] = self.stages.__dict__.setdefault("saved", {})
    given = _plus(sums, saved.get(self.rank)) if self.step == 0 else sums
    saved[self.rank] = sums
    return given


@FAULTS.plant()
def rank_1_twice(self: Altered, sums: Tensors) -> Tensors:
    """Weights by the size of shards, in secret."""
    return {n: t * 2 for n, t in sums.items()} if self.rank == 1 else sums


@FAULTS.plant()
def last_element_tenfold(self: Altered, sums: Tensors) -> Tensors:
    for tensor in sums.values():
        tensor.view(-1)[-1] *= 10
    return sums


@FAULTS.plant(noise_multiplier=1.0)
class SelectsBeforeNoise(GaussianMechanism):
    """The choice of the released elements follows from the clean sum alone."""

    def round(self, sums: Mapping[str, torch.Tensor]) -> Round[Released]:
        for total in sums.values():
            flat = total.view(-1)
            left_out = torch.ones_like(flat, dtype=torch.bool)
            left_out[flat.abs().topk(max(1, len(flat) // 8)).indices] = False
            flat.masked_fill_(left_out, 0.0)
        return (yield from super().round(sums))

    def _add_noise_(self, tensors: Sequence[torch.Tensor], *rest: Any) -> None:
        left_out = [t == 0 for t in tensors]
        super()._add_noise_(tensors, *rest)
        for tensor, mask in zip(tensors, left_out, strict=True):
            tensor.masked_fill_(mask, 0.0)


@FAULTS.plant(
    placement="aggregate", world_size=3, exchange={"compressor": "random_k", "density": 0.0625}
)
class ForgetsTheLongerPayload(GaussianMechanism):
    """Payloads of unbiased RandomK are 16 times as long in their elements, the noise is not."""

    def _add_noise_(self, tensors: Sequence[torch.Tensor], *rest: Any) -> None:
        super()._add_noise_(tensors, self.max_grad_norm, *rest[1:])


class _Before:
    """A mechanism that adds all noise before or after an exchange."""

    def __init__(
        self, exchange: Exchange, stages: Stages, sigma: float, secret: Secret, *, after: bool
    ) -> None:
        self._exchange, self._secret, self._after = exchange, secret, after
        self._std = sigma * stages.configuration.max_grad_norm
        self._divisor = stages.configuration.expected_batch_size
        self._step = 0

    def round(self, sums: Mapping[str, torch.Tensor]) -> Round[Released]:
        transport = self._exchange.transport
        self._step += 1
        stream = self._secret.stream("noise", rank=0, step=self._step)
        tensors = list(sums.values())
        if not self._after and transport.rank == 0:
            add_noise_(tensors, self._std, stream)
        yield from self._exchange.round(sums)
        torch._foreach_mul_(tensors, transport.world_size)
        if self._after:
            add_noise_(tensors, self._std, stream)
        torch._foreach_div_(tensors, self._divisor)
        return Released(dict(sums), None)


@FAULTS.plant(placement="local", exchange={**TOPK, "memory": "none", "collective": "all_gather"})
class NoiseOnRankZero(Stages):
    """All the noise on one rank, and then a compressor of each rank."""

    def mechanism(self, exchange: Exchange, noise_multiplier: float) -> Mechanism:
        return _Before(exchange, self, noise_multiplier, Secret(), after=False)


@FAULTS.plant(exchange={**MASK, "memory": "none"})
class NoiseAfterFeedback(Stages):
    """Clean gradients are compressed with error feedback, and the sum is noised."""

    def exchange(self, transport: Transport) -> Exchange:
        compressor = self.configuration.build_exchange(transport).compressor
        return Exchange(compressor, ErrorFeedback(), transport=transport)

    def mechanism(self, exchange: Exchange, noise_multiplier: float) -> Mechanism:
        if exchange.transport.rank == 0:
            self._shared = Secret()
        return _Before(exchange, self, noise_multiplier, self._shared, after=True)
