"""What keeps or releases sums clean."""

from collections.abc import Callable, Mapping
from typing import Any

import torch

from benchmarks.audit.stages import Mechanism, Stages
from comm_hooks.collectives.requests import Round
from comm_hooks.exchange import Exchange
from comm_hooks.memory import ErrorFeedback
from comm_hooks.optim.private.noise.gaussian import add_noise_
from comm_hooks.optim.private.noise.mechanism import Released
from comm_hooks.optim.private.noise.secret import Secret

Tensors = dict[str, torch.Tensor]
MASK = {"compressor": "random_k", "density": 0.125, "unbiased": False}
TOPK = {"compressor": "topk", "density": 0.0625}


class Altered:
    """A mechanism whose sums are changed before by a function that remembers."""

    def __init__(self, stages: Stages, inner: Mechanism, exchange: Exchange, alter: Any) -> None:
        self._inner = inner
        self._alter = alter
        self.stages = stages
        self.rank = exchange.transport.rank
        self.step = 0
        self.memory: Any = None

    def round(self, sums: Mapping[str, torch.Tensor]) -> Round[Released]:
        altered = self._alter(self, {name: t.clone() for name, t in sums.items()})
        self.step += 1
        released = yield from self._inner.round(altered)
        return released


def altered_by(alter: Callable[[Altered, Tensors], Tensors]) -> type[Stages]:
    class Faulty(Stages):
        def mechanism(self, exchange: Exchange, noise_multiplier: float) -> Mechanism:
            inner = super().mechanism(exchange, noise_multiplier)
            return Altered(self, inner, exchange, alter)

    return Faulty


def _plus(one: Tensors, other: Tensors | None, factor: float) -> Tensors:
    if other is None:
        return one
    return {name: t + factor * other[name] for name, t in one.items()}


def _leaking(share: float) -> Callable[[Altered, Tensors], Tensors]:
    def alter(self: Altered, sums: Tensors) -> Tensors:
        given = _plus(sums, self.memory, 1.0)
        # The smaller half of each tensor is held back, for later steps.
        is_sent = {n: t.abs() >= t.abs().median() for n, t in given.items()}
        self.memory = {n: share * t * ~is_sent[n] for n, t in given.items()}
        return {n: t * is_sent[n] for n, t in given.items()}

    return alter


leaks_a_quarter = _leaking(0.25)
leaks_a_twentieth = _leaking(0.05)


def last_sum_again(self: Altered, sums: Tensors) -> Tensors:
    given, self.memory = _plus(sums, self.memory, 1.0), sums
    return given


def late(self: Altered, sums: Tensors) -> Tensors:
    """Only after a warm-up of 20 steps."""
    given = _plus(sums, self.memory, 0.5) if self.step > 20 else sums
    self.memory = sums
    return given


def every_seventh(self: Altered, sums: Tensors) -> Tensors:
    given = _plus(sums, self.memory, 1.0) if self.step % 7 == 6 else sums
    self.memory = sums
    return given


def on_rank_1_alone(self: Altered, sums: Tensors) -> Tensors:
    return last_sum_again(self, sums) if self.rank == 1 else sums


def of_large_sums(self: Altered, sums: Tensors) -> Tensors:
    """What a global clip takes off comes later: of the large sums alone."""
    norm = float(torch.cat([t.flatten() for t in sums.values()]).norm())
    given = _plus(sums, self.memory, 1.0)
    self.memory = {n: 0.1 * t for n, t in sums.items()} if norm > 5 else None
    return given


def after_a_restart(self: Altered, sums: Tensors) -> Tensors:
    """A checkpoint of the clean sums is added again by the process that loads it."""
    saved: dict[int, Tensors] = self.stages.__dict__.setdefault("saved", {})
    given = _plus(sums, saved.get(self.rank), 1.0) if self.step == 0 else sums
    saved[self.rank] = sums
    return given


def rank_1_twice(self: Altered, sums: Tensors) -> Tensors:
    """Weights by the size of shards, in secret."""
    return {n: t * 2 for n, t in sums.items()} if self.rank == 1 else sums


def last_element_tenfold(self: Altered, sums: Tensors) -> Tensors:
    for tensor in sums.values():
        tensor.view(-1)[-1] *= 10
    return sums


class _Before:
    """A mechanism that adds noise by a function of its own, before or after an exchange."""

    def __init__(
        self, exchange: Exchange, std: float, divisor: float, *, shared: Secret | None = None
    ) -> None:
        self._exchange = exchange
        self._std = std
        self._divisor = divisor
        self._secret = shared or Secret()
        self._after = shared is not None
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


class NoiseOnRankZero(Stages):
    """All the noise on one rank, and then a compressor of each rank."""

    def mechanism(self, exchange: Exchange, noise_multiplier: float) -> Mechanism:
        configuration = self.configuration
        std = noise_multiplier * configuration.max_grad_norm
        return _Before(exchange, std, configuration.expected_batch_size)


class NoiseAfterFeedback(Stages):
    """Clean gradients are compressed with error feedback, and the sum is noised."""

    _shared: Secret

    def exchange(self, transport: object) -> Exchange:
        exchange = self.configuration.build_exchange(transport)  # type: ignore[arg-type]
        return Exchange(exchange.compressor, ErrorFeedback(), transport=exchange.transport)

    def mechanism(self, exchange: Exchange, noise_multiplier: float) -> Mechanism:
        if exchange.transport.rank == 0:
            self._shared = Secret()
        configuration = self.configuration
        std = noise_multiplier * configuration.max_grad_norm
        return _Before(exchange, std, configuration.expected_batch_size, shared=self._shared)


FAULTS: dict[str, tuple[dict[str, Any], type[Stages]]] = {
    "memory: leaks a quarter": ({}, altered_by(leaks_a_quarter)),
    "memory: leaks a twentieth": ({"placement": "local"}, altered_by(leaks_a_twentieth)),
    "memory: the last sum again": ({"exchange": MASK}, altered_by(last_sum_again)),
    "memory: after 20 steps": ({"placement": "shares"}, altered_by(late)),
    "memory: every seventh step": ({"exchange": TOPK}, altered_by(every_seventh)),
    "memory: on rank 1 alone": ({"world_size": 3}, altered_by(on_rank_1_alone)),
    "memory: of large sums": ({"world_size": 1}, altered_by(of_large_sums)),
    "memory: after a restart": ({}, altered_by(after_a_restart)),
    "memory: rank 1 counts twice": ({}, altered_by(rank_1_twice)),
    "memory: last elements count tenfold": ({}, altered_by(last_element_tenfold)),
    "memory: noise after feedback": ({"exchange": {**MASK, "memory": "none"}}, NoiseAfterFeedback),
    "memory: noise on rank 0": (
        {"placement": "local", "exchange": {**TOPK, "memory": "none", "collective": "all_gather"}},
        NoiseOnRankZero,
    ),
}
