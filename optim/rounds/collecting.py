"""How the mean over a round's clients comes about."""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from comm_hooks.exchange import Exchange
from comm_hooks.memory.base import Memory


@dataclass(frozen=True)
class Contribution:
    """What one client returns at the end of its turn.

    Attributes:
        client: its number.
        delta: how far it has come, one tensor per parameter; may be overwritten.
        statistics: what else its inner optimizer wants averaged, by name.
    """

    client: int
    delta: list[torch.Tensor]
    statistics: dict[str, torch.Tensor]


@dataclass(frozen=True)
class Aggregate:
    """What the server receives, the same on all ranks.

    Attributes:
        delta: the mean; None if nobody returned anything.
        statistics: means, by name.
        missing: the clients that were drawn and are not in it.
        contributors: how many are.
    """

    delta: list[torch.Tensor] | None
    statistics: dict[str, torch.Tensor]
    missing: list[int]
    contributors: int


class Collection(ABC):
    """Collects one round.  All ranks call :meth:`add` equally often, then :meth:`finish`.

    Args:
        exchange: how deltas travel.
        delta: zeros, by parameter name.
        statistics: zeros, by name; the same names and shapes on all ranks.
    """

    def __init__(
        self,
        exchange: Exchange,
        delta: Mapping[str, torch.Tensor],
        statistics: Mapping[str, torch.Tensor],
    ) -> None:
        self.exchange = exchange
        self.total = dict(delta)
        self.statistics = dict(statistics)

    @abstractmethod
    def add(
        self,
        turn: Sequence[int | None],
        contribution: Contribution | None,
        memory: Memory | None,
    ) -> None:
        """Take what this rank's client returned.

        Args:
            turn: whose turn it is, one client per rank; None where a rank sits out.
            contribution: None if this rank sits out or its client's delta is not finite.
            memory: of this rank's client.
        """

    @abstractmethod
    def finish(self) -> Aggregate:
        """Return the mean."""


class PlainCollection(Collection):
    """Averages over the clients that returned something finite, whoever they are.

    Without a memory and with a linear compressor a rank adds its clients' deltas up before it
    compresses; otherwise every client's payload crosses.
    """

    def __init__(
        self,
        exchange: Exchange,
        delta: Mapping[str, torch.Tensor],
        statistics: Mapping[str, torch.Tensor],
    ) -> None:
        super().__init__(exchange, delta, statistics)
        self._adds_up = exchange.compressor.linear and exchange.memory is None
        self._scheduled: list[int | None] = []
        self._own: set[int] = set()
        self._contributed: list[int] = []

    def add(
        self,
        turn: Sequence[int | None],
        contribution: Contribution | None,
        memory: Memory | None,
    ) -> None:
        self._scheduled += turn
        total = list(self.total.values())
        # A rank that sits out sends zeros, which leave whatever memory this is alone.
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

    def _sum(
        self, delta: list[torch.Tensor], turn: Sequence[int | None], memory: Memory | None
    ) -> None:
        """Replace ``delta`` by its sum over ranks, and note who of ``turn`` is in it."""
        own = [float(client in self._own) for client in turn]
        flags = torch.tensor(own, device=delta[0].device)
        message = dict(zip(self.total, delta, strict=True))
        # The exchange tells its workspaces apart by the names in them.
        beside = {f"<contributors with {next(iter(self.total))}>": flags}
        self.exchange.average_(message, beside=beside, memory=memory)
        torch._foreach_mul_(delta, self.exchange.transport.world_size)
        is_in = (flags * self.exchange.transport.world_size > 0.5).tolist()
        self._contributed += [
            client for client, here in zip(turn, is_in, strict=True) if here and client is not None
        ]
