"""Simulated ranks that take private steps and are restarted in between."""

import copy
import hashlib
import math
import os
import random
import threading
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from itertools import accumulate
from typing import Any
from unittest import mock

import numpy as np
import torch

from benchmarks.audit.configuration import Mechanism, Stages
from comm_hooks.collectives.requests import AllReduce, Request
from comm_hooks.collectives.simulated import Simulated
from comm_hooks.compressors.identity import Identity
from comm_hooks.exchange import Exchange
from comm_hooks.optim.private.random_states import random_states_kept

# The seed of a user at the start of every process: nothing private may follow from it.
_USER_SEED = 42

Shapes = Mapping[str, tuple[int, ...]]

SHAPES: Shapes = {
    "stem.weight": (4, 3, 3, 3),
    "stem.bias": (3,),
    "scale": (1,),
    "block.weight": (24, 32),
    "block.1.weight": (24, 32),
    "mix.weight": (3, 5, 7),
    "head.weight": (30, 21),
}
"""The shapes of a small model with parameters of all kinds."""


def parts_of(shapes: Shapes) -> list[tuple[str, int, int]]:
    """Return the name, start and end of each parameter in the row of all elements.

    Example::

        >>> parts_of({"weight": (2, 3), "bias": (3,)})
        [('weight', 0, 6), ('bias', 6, 9)]
    """
    ends = list(accumulate(math.prod(shape) for shape in shapes.values()))
    return list(zip(shapes, [0, *ends], ends, strict=False))


class World:
    """All ranks of a private training, in one process.

    Args:
        stages: makes the parts.
        shapes: of the parameters, by name.
        noise_multiplier: sigma; with a tiny one the releases show the data themselves.
        dense: whether to leave out the configuration's compressor.

    Attributes:
        parts: the name, start and end of each parameter in the row of all elements.
        numel: the number of elements.
        exchanges: of the ranks, since the last start.
        reported_variance: of the last release, times B^2.
        consistent: whether all ranks received the same in all steps.
    """

    def __init__(
        self, stages: Stages, shapes: Shapes, noise_multiplier: float, *, dense: bool = False
    ) -> None:
        # A copy: the parts of this world must leave nothing for the next one.
        self._stages = copy.copy(stages)
        self._shapes, self._noise_multiplier, self._dense = shapes, noise_multiplier, dense
        self._simulated = _Listening(stages.configuration.world_size)
        self._mechanisms: list[Mechanism] = []
        self.parts = parts_of(shapes)
        self.numel = self.parts[-1][2]
        self.exchanges: list[Exchange] = []
        self.reported_variance: float | None = None
        self.consistent = True
        self.sums()
        self.start()

    @property
    def sent(self) -> list[torch.Tensor]:
        """The contributions of all ranks to each sum over ranks of the last step."""
        return self._simulated.sent

    def start(self) -> None:
        """Start all processes (again) with the saved state of the exchanges and the user's seed."""
        states = [exchange.state_dict() for exchange in self.exchanges]
        with user_seed():
            self.exchanges = [self._make_exchange(rank) for rank in range(len(self._sums))]
            self._mechanisms = [
                self._stages.mechanism(exchange, self._noise_multiplier)
                for exchange in self.exchanges
            ]
            self._generators = _generators()
        for exchange, state in zip(self.exchanges, states, strict=False):
            exchange.load_state_dict(state)

    def steps(self, *processes: int) -> Iterator[tuple[int, int]]:
        """Yield (process, step) for consecutive processes of so many steps each."""
        for process, steps in enumerate(processes):
            if process:
                self.start()
            for step in range(steps):
                yield process, step

    def sums(self) -> torch.Tensor:
        """Return zeros (N, d) for the clipped sums of all ranks, to be filled before a release."""
        # New ones in each step, as in training: a part may keep the last ones.
        self._sums = torch.zeros(self._simulated.world_size, self.numel)
        return self._sums

    def release(self) -> torch.Tensor:
        """Take a step with the filled sums; return the released vector times B, (d,)."""
        rounds = [
            m.round(self._by_name(s)) for m, s in zip(self._mechanisms, self._sums, strict=True)
        ]
        self._simulated.sent = []
        # A draw from global generators follows from the user's seed.
        with random_states_kept(), warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="world size is 1")
            _set_generators(self._generators)
            all_released = self._simulated.run(rounds)
            self._generators = _generators()
        batch = self._stages.configuration.expected_batch_size
        flat = [torch.cat([t.flatten() for t in r.tensors.values()]) for r in all_released]
        self.consistent &= all(torch.equal(flat[0], other) for other in flat[1:])
        variance = all_released[0].noise_variance
        self.reported_variance = None if variance is None else variance * batch**2
        return flat[0] * batch

    def _by_name(self, flat: torch.Tensor) -> dict[str, torch.Tensor]:
        return {name: flat[start:end].view(self._shapes[name]) for name, start, end in self.parts}

    def _make_exchange(self, rank: int) -> Exchange:
        if self._dense:
            return Exchange(Identity(), min_numel=1, min_ndim=1, transport=self._simulated[rank])
        exchange = self._stages.exchange(self._simulated[rank])
        # The parameters of canaries are small, and are to be compressed all the same.
        exchange.settings = replace(exchange.settings, min_numel=1)
        return exchange


class _Listening(Simulated):
    """Records the contributions of ranks to sums."""

    def __init__(self, world_size: int) -> None:
        super().__init__(world_size)
        self.sent: list[torch.Tensor] = []

    def _perform(self, requests: Sequence[Request]) -> Sequence[Any]:
        if isinstance(requests[0], AllReduce):
            self.sent.append(torch.stack([request.payload for request in requests]))
        return super()._perform(requests)


@contextmanager
def user_seed() -> Iterator[None]:
    """Set the seed of a user for a while, and restore all generators afterwards."""
    with random_states_kept():
        torch.default_generator.manual_seed(_USER_SEED)
        np.random.seed(_USER_SEED)
        random.seed(_USER_SEED)
        yield


@contextmanager
def fixed_secrets(key: int) -> Iterator[None]:
    """Replace the operating system's randomness by numbers that follow from a key.

    Two plays with one key have the same noise and the same draws, so that their releases differ by
    the data alone.  Other threads, which would draw in between, keep the true randomness.
    """
    drawn = 0
    mine, true = threading.get_ident(), os.urandom

    def urandom(size: int) -> bytes:
        nonlocal drawn
        if threading.get_ident() != mine:
            return true(size)
        drawn += 1
        return hashlib.shake_256(f"{key} {drawn}".encode()).digest(size)

    with mock.patch.object(os, "urandom", urandom), mock.patch.object(random, "_urandom", urandom):
        yield


def twins(play: Callable[[bool], torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor] | None:
    """Return the results of ``play`` without and with a change, by the same secrets.

    Returns:
        None if two plays without the change differ: ``play`` draws from an unknown source.
    """
    key = int.from_bytes(os.urandom(8), "little")
    results = []
    for changed in (False, False, True):
        with fixed_secrets(key), user_seed():
            results.append(play(changed))
    return (results[0], results[2]) if torch.equal(results[0], results[1]) else None


_Generators = tuple[torch.Tensor, Any, Any]


def _generators() -> _Generators:
    return torch.get_rng_state(), np.random.get_state(), random.getstate()


def _set_generators(states: _Generators) -> None:
    torch.set_rng_state(states[0])
    np.random.set_state(states[1])
    random.setstate(states[2])
