"""Rounds of private clients: who plays, what they send and what is released."""

from collections.abc import Callable
from typing import Any

import torch

from benchmarks.audit.script.planting import EXTREMES, Plant
from benchmarks.audit.script.watched import flat
from comm_hooks.optim.private.client_level import PrivateParticipation
from comm_hooks.optim.rounds.local_rounds import LocalRounds
from comm_hooks.optim.rounds.participation import Contribution, deal


class Clients:
    """Follows rounds, and takes a client out of them, or makes what it sends extreme.

    Args:
        planted: the client; None: nobody.
        rank: of this process.
        release: records a release: the clean sum, the tensors and facts by name.
        conclude: is called with the rounds when one of them has ended.

    Attributes:
        playing: whether a round is going on, in which the model is some client's.
    """

    def __init__(
        self,
        planted: Plant | None,
        rank: int,
        release: Callable[..., None],
        conclude: Callable[[LocalRounds], None],
    ) -> None:
        self._planted, self._rank = planted, rank
        self._release, self._conclude_round = release, conclude
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
        self,
        method: Callable[..., list[list[int | None]]],
        participation: PrivateParticipation,
        round_index: int,
        transport: Any,
    ) -> list[list[int | None]]:
        turns = method(participation, round_index, transport)
        planted = self._planted
        drawn = sorted(c for turn in turns for c in turn if c is not None)
        self._drawn = drawn
        self._messages = None
        self._noise = []
        self.playing = True
        if planted is not None and planted.kind == "absent":
            drawn = [client for client in drawn if client != planted.index]
        return deal(drawn, transport.world_size)

    def _add(
        self,
        method: Callable[..., None],
        collection: Any,
        turn: Any,
        contribution: Contribution | None,
        memory: Any,
    ) -> None:
        planted = self._planted
        if planted is not None and contribution is not None:
            if contribution.client == planted.index and planted.kind in EXTREMES:
                torch._foreach_mul_(contribution.delta, EXTREMES[planted.kind])
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
        if guard._noise_std is not None:
            noise = (flat(total).double() - before).float()
            self._noise.append((guard._max_norm, noise))

    def _finish(self, method: Callable[..., Any], collection: Any) -> Any:
        aggregate = method(collection)
        participation = collection._participation
        sums = self._messages if self._messages is not None else [torch.zeros(1)]
        is_sum = collection._guard.place == "payload"
        self._release(
            # Where messages are clipped on arrival every rank has all of them.
            flat(sums) * (1.0 if is_sum or self._rank == 0 else 0.0),
            aggregate.delta,
            names=[],
            noise=self._noise,
            settings=(participation.noise_multiplier, participation.max_norm, 1.0),
            place="clients",
            dense=False,
            ranks=collection.exchange.transport.world_size,
            drawn=self._drawn if self._rank == 0 else [],
            left_out=0,
            discrete=False,
            share=1.0,
        )
        return aggregate

    def _conclude(self, method: Callable[..., None], rounds: LocalRounds, *args: Any) -> None:
        method(rounds, *args)
        if not isinstance(rounds.participation, PrivateParticipation):
            return
        self.playing = False
        self._conclude_round(rounds)
