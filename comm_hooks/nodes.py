"""What an exchange has besides with ``collective="hierarchical"``."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING
from weakref import WeakKeyDictionary

import torch

from comm_hooks.collectives.base import Transport
from comm_hooks.collectives.hierarchical import NodeShards, PartOfRanks
from comm_hooks.collectives.requests import Group, Round
from comm_hooks.compressors.base import Compressor
from comm_hooks.compressors.identity import Identity
from comm_hooks.layout import Layout
from comm_hooks.memory.base import Memory
from comm_hooks.wire.stamp import Stamp

if TYPE_CHECKING:
    from comm_hooks.exchange import Exchange


class Nodes:
    """This rank's node, and the exchange among the ranks at its place in each node.

    Args:
        transport: of all ranks.
        ranks_per_node: a divisor of their number.
        exchange_at: makes the exchange between nodes, given the place and the ranks' transport.
    """

    def __init__(
        self,
        transport: Transport,
        ranks_per_node: int,
        exchange_at: Callable[[int, Transport], Exchange],
    ) -> None:
        self.ranks_per_node = ranks_per_node
        self.place = transport.rank % ranks_per_node
        self._node = PartOfRanks(transport, Group("node", ranks_per_node))
        self._across = PartOfRanks(transport, Group("across", ranks_per_node))
        self.exchange = exchange_at(self.place, self._across)
        # Weak: the exchange drops a layout when DDP has rebuilt its bucket.
        self._shards: WeakKeyDictionary[Layout, NodeShards] = WeakKeyDictionary()

    @property
    def count(self) -> int:
        """How many nodes there are."""
        return self._across.world_size

    def traffic(self, layout: Layout) -> int:
        """Return the bytes that this rank sends inside its node in a round."""
        return self._shards_of(layout).traffic

    def round(
        self,
        layout: Layout,
        stamp: Stamp,
        *,
        compress: bool | Compressor,
        memory: Memory | None,
        scale: float,
        verify: bool,
        limit: float | None,
    ) -> Round[None]:
        """Return a round that replaces a layout's vectors by their mean over all ranks.

        Args:
            stamp: of the round of all ranks.
            compress, memory, scale, verify, limit: see
                :meth:`~comm_hooks.exchange.Exchange.unchecked_round`; they are about what goes
                between nodes.
        """
        shards = self._shards_of(layout)
        if self.count == 1:
            # Exact, and passes on what is still remembered of a run on more nodes.
            compress = Identity()

        def between(vectors: Sequence[torch.Tensor]) -> Round[None]:
            self.exchange.step = stamp.step
            rows = self.exchange.layout(shards.segments, layout.device)
            round_ = self.exchange.unchecked_round(
                rows,
                vectors,
                stamp,
                compress=compress,
                memory=memory,
                scale=scale,
                verify=verify,
                limit=limit,
            )
            yield from self._across.within(round_)

        yield from shards.round(stamp, between)

    def _shards_of(self, layout: Layout) -> NodeShards:
        shards = self._shards.get(layout)
        if shards is None:
            shards = self._shards[layout] = NodeShards(layout, self._node)
        return shards
