"""Which clients take part in a round, and which rank plays them."""

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import torch

from comm_hooks.collectives.base import Transport
from comm_hooks.exchange import Exchange
from comm_hooks.optim.rounds.collecting import Collection, PlainCollection
from comm_hooks.randomness import derive_key, random_bits
from comm_hooks.requirements import require_fraction, require_integer, require_positive


class ClientSampling(ABC):
    """Draws the clients of each round and collects what they return."""

    averages_statistics: ClassVar[bool] = True
    """Whether a collection takes statistics (second moments) beside the deltas."""

    @abstractmethod
    def turns(self, round_index: int, transport: Transport) -> list[list[int | None]]:
        """Return who plays whom: for each turn one client per rank, None where a rank sits out."""

    def turn(self) -> AbstractContextManager[None]:
        """Return what a client's steps are taken in."""
        return nullcontext()

    @abstractmethod
    def collection(
        self,
        exchange: Exchange,
        delta: Mapping[str, torch.Tensor],
        statistics: Mapping[str, torch.Tensor],
    ) -> Collection:
        """Return what collects the round whose turns have just been asked for.

        Args:
            exchange, delta, statistics: see
                :class:`~comm_hooks.optim.rounds.collecting.Collection`.
        """


@dataclass(frozen=True)
class Participation(ClientSampling):
    """Draws the clients of each round, the same on all ranks, without communication.

    Args:
        clients: how many there are, numbered from 0.  Client c is always played by rank
            c mod N, so that what it remembers never has to move.
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

    def collection(
        self,
        exchange: Exchange,
        delta: Mapping[str, torch.Tensor],
        statistics: Mapping[str, torch.Tensor],
    ) -> Collection:
        return PlainCollection(exchange, delta, statistics)


def deal(clients: Sequence[int], world_size: int) -> list[list[int | None]]:
    """Return the turns in which the ranks play these clients; at least one, if with nobody."""
    hands = [[c for c in clients if c % world_size == rank] for rank in range(world_size)]
    return [
        [hand[turn] if turn < len(hand) else None for hand in hands]
        for turn in range(max(1, *map(len, hands)))
    ]
