"""Full precision inside a node, compressed between nodes: a route around a route.

Ranks of one node are connected by NVLink or memory, nodes by a network that is ten to a hundred
times slower and shared by all ranks of a node.  So vectors are first averaged inside each node, and
only the means of nodes are compressed.
"""

from collections.abc import Callable, Iterator
from dataclasses import replace

import torch

from comm_hooks.collectives.base import Transport
from comm_hooks.collectives.requests import AllGather, AllToAll, Group, Round, ask
from comm_hooks.collectives.subgroup import Subgroup
from comm_hooks.exchange.layout import Layout, Segment
from comm_hooks.exchange.message import RoundContext
from comm_hooks.exchange.routes.route import Route, fill_nan_
from comm_hooks.exchange.shards import cut_into, join_from, shard_width
from comm_hooks.kernels.magnitudes import magnitudes
from comm_hooks.wire.gathered_header import GatheredHeader


class Hierarchical(Route):
    """Averages inside each node, shard by shard, and between nodes by another route.

    A round, with L ranks per node:

    1. every vector is cut into L equal ranges of elements, and the l-th rank of each node gets the
       l-th range of all vectors of its node, in float32;
    2. it takes their mean;
    3. the inner route replaces that by the mean over nodes: each rank of a node exchanges its own
       shard with the ranks at its place in the other nodes, so that all ranks share the work;
    4. each rank gives the result to its node, in float32.

    Inside a node each rank sends 8 (L - 1) / L bytes per element, as much as an all-reduce.

    If an element on any rank is not finite, the shards of its node are not, and the inner route
    spreads that over the nodes: all ranks end with NaN everywhere.

    Args:
        layout: holds the vectors.
        transport: the transport of all ranks.
        ranks_per_node: a divisor of the number of ranks.
        between: makes the inner route, given the layout of this rank's shards (all exempt
            parameters in one, then a shard of each parameter to compress) and the transport between
            the ranks at its place of each node.
    """

    def __init__(
        self,
        layout: Layout,
        transport: Transport,
        ranks_per_node: int,
        between: Callable[[Layout, Transport], Route],
    ) -> None:
        self._layout, self._work = layout, layout.work
        self._node = Subgroup(transport, Group("node", ranks_per_node))
        self._across = Subgroup(transport, Group("across", ranks_per_node))
        self._matrices = [rows.matrix for rows in layout.vectors()]
        self._widths = [shard_width(m.shape[1], ranks_per_node) for m in self._matrices]
        segments: list[Segment] = []
        for rows, width in zip(layout.vectors(), self._widths, strict=True):
            kind = rows in (layout.exact, layout.exempt), rows is layout.exact
            of_kind = [s.name for s in layout.segments if (s.exempt, s.exact) == kind]
            # Uncompressed rows have no names of their own, and every bucket may have some.
            names = of_kind[:1] if kind[0] else rows.names
            segments += [Segment(name, (width,), *kind) for name in names]
        self._numels = [segment.numel for segment in segments]
        self._shards = Layout(tuple(segments), layout.device, layout.granularity)
        self._between = between(self._shards, self._across)
        self._header = GatheredHeader(self._node.ranks, self._node.rank, covers_body=False)

    @property
    def traffic(self) -> int:
        inside = (self._node.world_size - 1) * (self._padded_nbytes + 4 * sum(self._numels))
        return inside + self.traffic_between_nodes

    @property
    def traffic_between_nodes(self) -> int:
        return self._between.traffic

    @property
    def _padded_nbytes(self) -> int:
        """The size of a payload between two ranks of the node: a multiple of 8."""
        return -(-(self._header.nbytes + 4 * sum(self._numels)) // 8) * 8

    def reduce(self, context: RoundContext) -> Round[None]:
        size, nbytes = magnitudes([self._work])[0], self._padded_nbytes
        outgoing = self._work.new_zeros(self._node.world_size, nbytes, dtype=torch.uint8)
        parts = self._in_parts(self._body(outgoing))
        for matrix, shards in zip(self._matrices, parts, strict=True):
            cut_into(shards, matrix)
        # The difference is 0 if all elements are finite, else NaN.
        self._header.write_(outgoing, context.stamp, size - size)
        received = yield from self._node.within(ask(AllToAll(outgoing)))
        health = self._header.check(received, context.stamp, context.checks)
        mean = self._body(received).mean(0)
        fill_nan_(mean, health)
        own = mean.split(self._numels)
        self._shards.load(own)
        into = self._shards.over(torch.empty_like(mean)) if context.mean else self._shards
        inner = replace(context, mean=into if context.mean else None)
        yield from self._across.within(self._between.reduce(inner))
        into.store(own)
        gathered = yield from self._node.within(ask(AllGather(mean.view(torch.uint8))))
        matrices = [rows.matrix for rows in (context.mean or self._layout).vectors()]
        for matrix, shards in zip(
            matrices, self._in_parts(gathered.view(torch.float32)), strict=True
        ):
            join_from(shards, matrix)

    def _body(self, payloads: torch.Tensor) -> torch.Tensor:
        """Return a view of the shards in payloads: (L, numel of a shard), float32."""
        first = self._header.nbytes
        return payloads[:, first : first + 4 * sum(self._numels)].view(torch.float32)

    def _in_parts(self, shards: torch.Tensor) -> Iterator[torch.Tensor]:
        """Yield, for each matrix of vectors, a view (L, rows, width) of its shards."""
        sizes = [len(m) * width for m, width in zip(self._matrices, self._widths, strict=True)]
        for matrix, part in zip(self._matrices, shards.split(sizes, dim=1), strict=True):
            yield part.unflatten(1, (len(matrix), -1))
