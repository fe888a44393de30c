"""Full precision inside a node, compressed between nodes.

Ranks of one node reach each other over NVLink or memory, those of different nodes over a network
that is ten to a hundred times slower and that all ranks of a node share.  So the vectors are first
averaged inside each node, and only the nodes' means are compressed.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch

from comm_hooks.collectives.base import Transport
from comm_hooks.collectives.requests import (
    AllGather,
    AllToAll,
    Group,
    Request,
    Result,
    Round,
)
from comm_hooks.collectives.routes import spoil_
from comm_hooks.layout import Layout, Segment
from comm_hooks.shards import cut_into, join_from, shard_width
from comm_hooks.wire.gathered_header import GatheredHeader
from comm_hooks.wire.stamp import Stamp


class PartOfRanks(Transport):
    """A group of a transport's ranks as a world of its own, with ranks from 0.

    Args:
        transport: of all ranks.
        group: which of them.

    Example::

        >>> from comm_hooks.collectives import Simulated
        >>> from comm_hooks.collectives.requests import Group
        >>> rank_5 = Simulated(8)[5]  # of two nodes with ranks 0 to 3 and 4 to 7
        >>> across = PartOfRanks(rank_5, Group("across", ranks_per_node=4))
        >>> across.rank, across.world_size
        (1, 2)
    """

    def __init__(self, transport: Transport, group: Group) -> None:
        self._transport = transport
        self._group = group
        self._members = group.members(transport.rank, transport.world_size)

    @property
    def rank(self) -> int:
        return self._members.index(self._transport.rank)

    @property
    def world_size(self) -> int:
        return len(self._members)

    @property
    def ranks(self) -> Sequence[int]:
        return [self._transport.ranks[member] for member in self._members]

    def perform(self, request: Request) -> Any:
        return self._transport.perform(replace(request, group=self._group))

    def start(self, request: Request) -> torch.futures.Future[Any]:
        return self._transport.start(replace(request, group=self._group))

    def within(self, round_: Round[Result]) -> Round[Result]:
        """Return a round of the part as a piece of a round of all ranks, which goes on after it."""
        try:
            request = next(round_)
            while True:
                reply = yield replace(request, final=False, group=self._group)
                request = round_.send(reply)
        except StopIteration as stop:
            return stop.value


class NodeShards:
    """Averages a layout's vectors inside each node, shard by shard, and lets others go on.

    A round, with L ranks per node:

    1. every vector is cut into L equal ranges of elements, and the l-th rank of each node gets the
       l-th range of all vectors of its node, in float32;
    2. it takes their mean;
    3. ``between`` replaces that by the mean over nodes: each rank of a node exchanges its own
       shard with the ranks at its place in the other nodes, so that all ranks share the work;
    4. each rank gives the result to its node, in float32.

    Inside a node each rank sends 8 (L - 1) / L bytes per element, as much as an all-reduce.

    If an element on any rank is not finite, the shards of its node are not, and ``between`` spreads
    that over the nodes: all ranks end with NaN everywhere.

    Args:
        layout: whose workspace holds the vectors.
        node: the ranks of this rank's node.

    Attributes:
        segments: the shards of this rank, as ``between`` gets them: all exempt parameters in one,
            then a shard of each parameter to compress.
    """

    def __init__(self, layout: Layout, node: PartOfRanks) -> None:
        # Not the layout: who keeps the two together knows by it that DDP has rebuilt the bucket.
        self._work = layout.work
        self._node = node
        self._matrices = [rows.matrix for rows in layout.vectors()]
        self._widths = [shard_width(m.shape[1], node.world_size) for m in self._matrices]
        self.segments: list[Segment] = []
        for rows, width in zip(layout.vectors(), self._widths, strict=True):
            kind = rows in (layout.exact, layout.exempt), rows is layout.exact
            of_kind = [s.name for s in layout.segments if (s.exempt, s.exact) == kind]
            # Uncompressed rows have no names of their own, and every bucket may have some.
            names = of_kind[:1] if kind[0] else rows.names
            self.segments += [Segment(name, (width,), *kind) for name in names]
        self._numels = [segment.numel for segment in self.segments]
        self._header = GatheredHeader(node.ranks, node.rank, covers_body=False)

    @property
    def traffic(self) -> int:
        """The bytes that each rank sends, and receives, inside its node in a round."""
        others, nbytes = self._node.world_size - 1, 4 * sum(self._numels)
        return others * (self._padded_nbytes + nbytes)

    @property
    def _padded_nbytes(self) -> int:
        """The size of what each rank of the node gets from each other: a multiple of 8."""
        return -(-(self._header.nbytes + 4 * sum(self._numels)) // 8) * 8

    def round(
        self, stamp: Stamp, between: Callable[[Sequence[torch.Tensor]], Round[None]]
    ) -> Round[None]:
        """Return a round that replaces the workspace's vectors by their mean over all ranks.

        Args:
            stamp: what all ranks must have in common.
            between: returns a round among the ranks at this place of each node; it replaces float32
                tensors shaped like the segments by their means.
        """
        norm = torch.linalg.vector_norm(self._work)
        # 0 if all elements are finite, else NaN.
        outgoing = self._cut()
        self._header.write_(outgoing, stamp, norm - norm)
        received = yield from self._node.within(_ask(AllToAll(outgoing)))
        health = self._header.health(received, stamp)
        mean = self._body(received).mean(0)
        spoil_(mean, health)
        yield from between(mean.split(self._numels))
        gathered = yield from self._node.within(_ask(AllGather(mean.view(torch.uint8))))
        self._join(gathered.view(torch.float32))

    def _cut(self) -> torch.Tensor:
        """Return what each rank of the node gets: (L, nbytes), uint8, without its header."""
        nbytes = self._padded_nbytes
        payloads = self._work.new_zeros(self._node.world_size, nbytes, dtype=torch.uint8)
        for matrix, place in zip(self._matrices, self._places(self._body(payloads)), strict=True):
            cut_into(place, matrix)
        return payloads

    def _body(self, payloads: torch.Tensor) -> torch.Tensor:
        """Return a view of the shards in payloads: (L, numel of a shard), float32."""
        first = self._header.nbytes
        return payloads[:, first : first + 4 * sum(self._numels)].view(torch.float32)

    def _join(self, shards: torch.Tensor) -> None:
        """Copy the shards of all ranks of the node (L, numel of a shard) to the workspace."""
        for matrix, place in zip(self._matrices, self._places(shards), strict=True):
            join_from(place, matrix)

    def _places(self, shards: torch.Tensor) -> list[torch.Tensor]:
        """Return where the rows of each matrix lie in shards: views (L, rows, width)."""
        counts = [len(matrix) for matrix in self._matrices]
        sizes = [n * width for n, width in zip(counts, self._widths, strict=True)]
        return [
            place.unflatten(1, (n, -1))
            for place, n in zip(shards.split(sizes, dim=1), counts, strict=True)
        ]


def _ask(request: Request) -> Round[Any]:
    return (yield request)
