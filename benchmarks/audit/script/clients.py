"""Rounds of private clients: their turns, messages and releases."""

from collections.abc import Callable
from typing import Any

import torch

from benchmarks.audit.script.draws import EXTREMES, Plant
from benchmarks.audit.script.watched import flat
from comm_hooks.optim.private.client_level import PrivateParticipation
from comm_hooks.optim.rounds.local_rounds import LocalRounds
from comm_hooks.optim.rounds.participation import deal


class Clients:
    """Follows rounds, and removes a client from them, or makes its message extreme.

    Args:
        planted: the client; None for none.
        rank: of this process.
        release: records a release: the clean sum, the tensors and facts by name.
        conclude: is called with the rounds at the end of each.

    Attributes:
        playing: whether a round is going on, in which the model is some client's.
        observers: by event; see :mod:`benchmarks.audit.events`.
    """

    def __init__(
        self,
        planted: Plant | None,
        rank: int,
        release: Callable[..., None],
        conclude: Callable[[LocalRounds], None],
    ) -> None:
        self._index = planted.index if planted is not None else None
        self._kind = planted.kind if planted is not None else ""
        self._rank, self._release, self._after_round = rank, release, conclude
        self.playing = False
        self._drawn: list[int] = []
        self._messages: list[torch.Tensor] | None = None
        self._noise: list[tuple[float, torch.Tensor]] = []
        self.observers: dict[str, Callable[..., Any]] = {
            "clients": self._turns,
            "contribution": self._add,
            "client's message": self._clip,
            "clients' noise": self._add_noise,
            "clients' release": self._finish,
            "round": self._conclude,
        }

    def _turns(
        self, method: Callable[..., Any], participation: Any, round_index: int, transport: Any
    ) -> list[list[int | None]]:
        turns = method(participation, round_index, transport)
        drawn = sorted(c for turn in turns for c in turn if c is not None)
        self._drawn, self._messages, self._noise, self.playing = drawn, None, [], True
        if self._kind == "absent":
            drawn = [client for client in drawn if client != self._index]
        return deal(drawn, transport.world_size)

    def _add(
        self,
        method: Callable[..., None],
        collection: Any,
        turn: Any,
        contribution: Any,
        memory: Any,
    ) -> None:
        if contribution is not None and contribution.client == self._index:
            torch._foreach_mul_(contribution.delta, EXTREMES.get(self._kind, 1.0))
        method(collection, turn, contribution, memory)

    def _clip(self, method: Callable[..., None], guard: Any, message: Any) -> None:
        method(guard, message)
        clipped = [tensor.detach().clone() for tensor in message]
        if self._messages is None:
            self._messages = clipped
        else:
            torch._foreach_add_(self._messages, clipped)

    def _add_noise(self, method: Callable[..., None], guard: Any, total: Any) -> None:
        before = flat(total).double()
        method(guard, total)
        if guard.noise_std is not None:
            self._noise.append((guard._max_norm, (flat(total).double() - before).float()))

    def _finish(self, method: Callable[..., Any], collection: Any) -> Any:
        aggregate = method(collection)
        participation = collection._participation
        sums = self._messages if self._messages is not None else [torch.zeros(1)]
        # Messages that are clipped on arrival are the same on all ranks: count them once.
        counts = collection._guard.place == "payload" or self._rank == 0
        self._release(
            flat(sums) * float(counts),
            aggregate.delta,
            noise=self._noise,
            settings=(participation.noise_multiplier, participation.max_norm, 1.0),
            place="clients",
            ranks=collection.exchange.transport.world_size,
            drawn=self._drawn if self._rank == 0 else [],
        )
        return aggregate

    def _conclude(self, method: Callable[..., None], rounds: LocalRounds, *args: Any) -> None:
        method(rounds, *args)
        if isinstance(rounds.participation, PrivateParticipation):
            self.playing = False
            self._after_round(rounds)
