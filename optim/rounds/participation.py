"""The clients of a round: their draw, the ranks that play them, and their mean."""

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import ClassVar

import numpy as np
import torch
from torch.optim import Optimizer

from comm_hooks.collectives.base import Transport
from comm_hooks.exchange import Exchange
from comm_hooks.memory.base import Memory
from comm_hooks.optim.rounds.turns import own_gradients
from comm_hooks.randomness import derive_key, random_bits
from comm_hooks.requirements import require_fraction, require_integer, require_positive
from comm_hooks.warnings import warn_program

Named = dict[str, torch.Tensor]
Turn = Sequence[int | None]
"""One client per rank; None where a rank sits out."""


@dataclass(frozen=True)
class Contribution:
    """The result of one client's turn.

    Attributes:
        client: its number.
        delta: how far it has come, one tensor per parameter; may be overwritten.
        statistics: other tensors that its inner optimizer shares, by name.
    """

    client: int
    delta: list[torch.Tensor]
    statistics: dict[str, torch.Tensor]


@dataclass(frozen=True)
class Aggregate:
    """The mean of a round, the same on all ranks.

    Attributes:
        delta: the mean; None if there is no contribution.
        statistics: means, by name.
        missing: the drawn clients without a contribution.
        contributors: the number of contributions.
    """

    delta: list[torch.Tensor] | None
    statistics: dict[str, torch.Tensor]
    missing: list[int]
    contributors: int


@dataclass(eq=False)
class Collection(ABC):
    """Collects one round.  All ranks call :meth:`add` equally often, then :meth:`finish`.

    Args:
        exchange: how deltas travel.
        total: zeros, by parameter name; where deltas are added up.
        statistics: zeros, by name; the same names and shapes on all ranks.
    """

    exchange: Exchange
    total: Named
    statistics: Named

    @abstractmethod
    def add(self, turn: Turn, contribution: Contribution | None, memory: Memory | None) -> None:
        """Add the contribution of this rank's client.

        Args:
            turn: one client per rank; None where a rank sits out.
            contribution: None if this rank sits out or its client's delta is not finite.
            memory: of this rank's client.
        """

    @abstractmethod
    def finish(self) -> Aggregate:
        """Return the mean."""


@dataclass(eq=False)
class PlainCollection(Collection):
    """Averages over the clients with finite contributions.

    Without a memory and with a linear compressor a rank adds its clients' deltas up before it
    compresses; otherwise every client's payload crosses.
    """

    _scheduled: list[int | None] = field(default_factory=list, init=False)
    _own: set[int] = field(default_factory=set, init=False)
    _contributed: list[int] = field(default_factory=list, init=False)

    @property
    def _adds_up(self) -> bool:
        return self.exchange.compressor.linear and self.exchange.memory is None

    def add(self, turn: Turn, contribution: Contribution | None, memory: Memory | None) -> None:
        self._scheduled += turn
        total = list(self.total.values())
        # A rank that sits out sends zeros, which leave the memory as it is.
        delta = [torch.zeros_like(t) for t in total]
        if contribution is not None:
            self._own.add(contribution.client)
            delta = contribution.delta
            if self.statistics:
                own = [contribution.statistics[name] for name in self.statistics]
                torch._foreach_add_(list(self.statistics.values()), own)
        if not self._adds_up:
            self._sum(delta, turn, memory)
        torch._foreach_add_(total, delta)

    def finish(self) -> Aggregate:
        if self._adds_up:
            self._sum(list(self.total.values()), self._scheduled, None)
        scheduled = {client for client in self._scheduled if client is not None}
        missing = sorted(scheduled - set(self._contributed))
        count = len(self._contributed)
        if not count:
            return Aggregate(None, {}, missing, 0)
        torch._foreach_div_(list(self.total.values()), count)
        if self.statistics:
            self.exchange.average_(self.statistics, compress=False)
            share = self.exchange.transport.world_size / count
            torch._foreach_mul_(list(self.statistics.values()), share)
        return Aggregate(list(self.total.values()), self.statistics, missing, count)

    def _sum(self, delta: list[torch.Tensor], turn: Turn, memory: Memory | None) -> None:
        """Replace ``delta`` by its sum over ranks, and note the clients of ``turn`` in it."""
        own = [float(client in self._own) for client in turn]
        flags = torch.tensor(own, device=delta[0].device, dtype=torch.float32)
        message = dict(zip(self.total, delta, strict=True))
        # The exchange tells its workspaces apart by the names in them.
        extras = {f"<contributors with {next(iter(self.total))}>": flags}
        self.exchange.average_(message, extras=extras, memory=memory)
        torch._foreach_mul_(delta, self.exchange.transport.world_size)
        is_in = (flags * self.exchange.transport.world_size > 0.5).tolist()
        self._contributed += [
            client for client, here in zip(turn, is_in, strict=True) if here and client is not None
        ]


class ClientSampling(ABC):
    """Draws the clients of each round and collects their contributions."""

    averages_statistics: ClassVar[bool] = True
    """Whether a collection takes statistics (second moments) in addition to deltas."""

    def prepare(self, exchange: Exchange) -> None:  # noqa: B027
        """Prepare for an exchange, before anything is sent."""

    @abstractmethod
    def turns(self, round_index: int, transport: Transport) -> list[list[int | None]]:
        """Return for each turn one client per rank, None where a rank sits out."""

    def turn(
        self, client: int, inner: Optimizer, server: Optimizer
    ) -> AbstractContextManager[None]:
        """Return the context of a client's steps.

        Args:
            client: its number.
            inner, server: the optimizers of the rounds.
        """
        return own_gradients(
            inner,
            lambda: warn_program(
                f"client {client} leaves gradients that no step has used, and they are dropped: "
                "its turn ends in the middle of an accumulation. Let it take a step with its last "
                "batch"
            ),
        )

    def check_step(self, *, is_scaled: bool) -> None:  # noqa: B027
        """Raise ``ValueError`` if a client may not take a step with scaled gradients."""

    @abstractmethod
    def collection(self, exchange: Exchange, delta: Named, statistics: Named) -> Collection:
        """Return an empty collection for the round of the last :meth:`turns`."""


@dataclass(frozen=True)
class Participation(ClientSampling):
    """Draws the clients of each round, the same on all ranks, without communication.

    Args:
        clients: their number; they are numbered from 0.  Client c is always played by rank
            c mod N, so that its state never has to move.
        fraction: of them that take part in each round, in (0, 1]; ``ceil(fraction * clients)``,
            drawn without replacement.
        seed: equal on all ranks.

    Raises:
        ValueError: if no client could be drawn.

    Example::

        >>> half = Participation(clients=50, fraction=0.5, seed=0)
        >>> len(half.draw(round_index=7))
        25
        >>> half.draw(7) == half.draw(7)
        True
    """

    clients: int
    fraction: float = 1.0
    seed: int = 0

    def __post_init__(self) -> None:
        require_positive(self, "clients", self.clients)
        require_fraction(self, "fraction", self.fraction)
        require_integer(self, "seed", self.seed)

    def draw(self, round_index: int) -> list[int]:
        """Return the clients of a round, counted from 0, in ascending order."""
        count = math.ceil(self.fraction * self.clients)
        bits = random_bits([derive_key(self.seed, round_index, "participation")], self.clients)[0]
        return sorted(np.argsort(bits, kind="stable")[:count].tolist())

    def turns(self, round_index: int, transport: Transport) -> list[list[int | None]]:
        return deal(self.draw(round_index), transport.world_size)

    def collection(self, exchange: Exchange, delta: Named, statistics: Named) -> Collection:
        return PlainCollection(exchange, delta, statistics)


def deal(clients: Sequence[int], world_size: int) -> list[list[int | None]]:
    """Return the turns in which the ranks play these clients; at least one, even if empty."""
    hands = [[c for c in clients if c % world_size == rank] for rank in range(world_size)]
    return [
        [hand[turn] if turn < len(hand) else None for hand in hands]
        for turn in range(max(1, *map(len, hands)))
    ]
