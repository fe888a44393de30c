"""The clients of a round: their random draw, their ranks, and their mean displacement."""

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
from comm_hooks.optim.rounds.shared_model import SharedModel
from comm_hooks.optim.rounds.turns import own_gradients
from comm_hooks.randomness import derive_key, random_bits
from comm_hooks.requirements import require_integer, require_kind, require_positive, require_within
from comm_hooks.warnings import warn_program

Named = dict[str, torch.Tensor]
Turn = Sequence[int | None]
"""For each rank, the number of the client that it runs at one time; None for no client."""


@dataclass(frozen=True)
class Contribution:
    """The result of one client's turn.

    Attributes:
        client: the client's number.
        delta: the client's displacement: parameters before minus after its local steps, one tensor
            per parameter; may be overwritten.
        statistics: tensors of its inner optimizer to average, such as second moments, by name.
    """

    client: int
    delta: list[torch.Tensor]
    statistics: dict[str, torch.Tensor]


@dataclass(frozen=True)
class Aggregate:
    """The mean over the clients of a round, the same on all ranks.

    Attributes:
        delta: the mean displacement, one tensor per parameter; None without any contribution.
        statistics: the means of the contributions' statistics, by name.
        missing: the drawn clients without a :class:`Contribution`.
        contributors: the number of contributions.
    """

    delta: list[torch.Tensor] | None
    statistics: dict[str, torch.Tensor]
    missing: list[int]
    contributors: int


@dataclass(eq=False)
class Collection(ABC):
    """Averages the results of a round's clients; all ranks call :meth:`add` equally often.

    Args:
        exchange: the exchange that averages displacements over ranks.
        total: zeros, by parameter name, to which displacements are added.
        statistics: zeros, by name; the same names and shapes on all ranks.
    """

    exchange: Exchange
    total: Named
    statistics: Named

    @abstractmethod
    def add(self, turn: Turn, contribution: Contribution | None, memory: Memory | None) -> None:
        """Add the contribution of this rank's client.

        Args:
            turn: one client per rank; None for a rank without one.
            contribution: the client's result; None without a client, or if it is not finite.
            memory: the error-feedback memory of this rank's client; None without error feedback.
        """

    @abstractmethod
    def finish(self) -> Aggregate:
        """Return the mean over all contributions; call once, on all ranks, after all turns."""


@dataclass(eq=False)
class PlainCollection(Collection):
    """A collection that takes the plain mean over the clients with finite contributions.

    Without error feedback and with a linear compressor, a rank adds up its clients' displacements
    before it compresses; otherwise every client's payload is sent.

    Args:
        weights: the weight of each client in the mean; None: all weigh the same.
    """

    weights: Sequence[float] | None = None
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
            delta, weight = contribution.delta, self._weight(contribution.client)
            if weight != 1:
                torch._foreach_mul_(delta, weight)
            if self.statistics:
                own = [contribution.statistics[name] for name in self.statistics]
                torch._foreach_add_(list(self.statistics.values()), own, alpha=weight)
        if not self._adds_up:
            self._sum(delta, turn, memory)
        torch._foreach_add_(total, delta)

    def finish(self) -> Aggregate:
        if self._adds_up:
            self._sum(list(self.total.values()), self._scheduled, None)
        scheduled = {client for client in self._scheduled if client is not None}
        missing = sorted(scheduled - set(self._contributed))
        count, weight = len(self._contributed), sum(map(self._weight, self._contributed))
        if not weight:
            return Aggregate(None, {}, missing, 0)
        torch._foreach_div_(list(self.total.values()), weight)
        if self.statistics:
            self.exchange.average_(self.statistics, compress=False)
            share = self.exchange.transport.world_size / weight
            torch._foreach_mul_(list(self.statistics.values()), share)
        return Aggregate(list(self.total.values()), self.statistics, missing, count)

    def _weight(self, client: int) -> float:
        return 1.0 if self.weights is None else self.weights[client]

    def _sum(self, delta: list[torch.Tensor], turn: Turn, memory: Memory | None) -> None:
        """Replace ``delta`` by its sum over ranks, and record the clients that are in the sum."""
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
    """Draws the clients of each round and averages their displacements."""

    averages_statistics: ClassVar[bool] = True
    """Whether second moments of the inner optimizers are averaged, besides displacements."""

    def prepare(self, exchange: Exchange, model: SharedModel) -> None:  # noqa: B027
        """Set up state that depends on the exchange or model; called once, before any round."""

    @abstractmethod
    def turns(self, round_index: int, transport: Transport) -> list[list[int | None]]:
        """Return the turns of a round: for each turn one client per rank, or None for no client."""

    def turn(
        self, client: int, inner: Optimizer, server: Optimizer
    ) -> AbstractContextManager[None]:
        """Return the context in which a client takes its local steps.

        Args:
            client: the client's number.
            inner, server: the inner optimizer and the server optimizer.
        """
        return own_gradients(
            inner,
            lambda: warn_program(
                f"clients(): client {client} leaves gradients that no step has used, and they are "
                "dropped: its turn ends within an accumulation. Call step() after its last batch"
            ),
        )

    def check_step(self, *, is_scaled: bool) -> None:  # noqa: B027
        """Raise ``ValueError`` if a GradScaler has scaled gradients and this is not allowed."""

    @abstractmethod
    def collection(self, exchange: Exchange, delta: Named, statistics: Named) -> Collection:
        """Return a new :class:`Collection` for the round that :meth:`turns` drew last."""


@dataclass(frozen=True)
class Participation(ClientSampling):
    """Draws the clients of each round, the same on all ranks, without communication.

    Args:
        clients: the number of clients; they are numbered from 0.  Of N ranks, rank c mod N always
            runs client c, so that its state never has to move.
        fraction: the share of clients that take part in each round, in (0, 1]:
            ``ceil(fraction * clients)``, drawn without replacement.
        seed: the seed of the draws, equal on all ranks.
        weights: the weight of each client in the mean, such as its number of samples, at least 0;
            by default all weigh the same.

    Raises:
        ValueError: for values out of range, with which no client could be drawn.

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
    weights: Sequence[float] | None = None

    def __post_init__(self) -> None:
        require_positive(self, "clients", self.clients)
        require_within(self, "fraction", self.fraction, "(0, 1]")
        require_integer(self, "seed", self.seed)
        if self.weights is not None:
            require_kind(self, "weights", self.weights, list, tuple)
            for weight in self.weights:
                require_within(self, "weights", weight, "[0, inf)")
            if len(self.weights) != self.clients or not any(self.weights):
                raise ValueError(
                    f"Participation: weights must be one number for each of {self.clients} "
                    f"clients, not all of them 0, got {len(self.weights)}"
                )
            mean = sum(self.weights) / self.clients
            object.__setattr__(self, "weights", tuple(w / mean for w in self.weights))

    def draw(self, round_index: int) -> list[int]:
        """Return the clients of a round, counted from 0, in ascending order."""
        count = math.ceil(round(self.fraction * self.clients, 9))  # 0.07 * 100 is above 7
        bits = random_bits([derive_key(self.seed, round_index, "participation")], self.clients)[0]
        return sorted(np.argsort(bits, kind="stable")[:count].tolist())

    def turns(self, round_index: int, transport: Transport) -> list[list[int | None]]:
        return deal(self.draw(round_index), transport.world_size)

    def collection(self, exchange: Exchange, delta: Named, statistics: Named) -> Collection:
        return PlainCollection(exchange, delta, statistics, self.weights)


def deal(clients: Sequence[int], world_size: int) -> list[list[int | None]]:
    """Return the turns, at least one, in which rank c mod N runs client c; None for no client."""
    hands = [[c for c in clients if c % world_size == rank] for rank in range(world_size)]
    return [
        [hand[turn] if turn < len(hand) else None for hand in hands]
        for turn in range(max(1, *map(len, hands)))
    ]
