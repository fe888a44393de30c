"""In which order a round uses collectives.

A route takes the vectors in a layout's workspace to their mean over ranks, in place:

* :class:`OneShot` with ``sum_on_wire``: one all-reduce of linear payloads;
* :class:`OneShot` otherwise: one all-gather, and every rank decodes all payloads in rank order;
* :class:`Sharded`: every rank owns a shard of each parameter, averages the payloads it gets for it,
  compresses the mean again and gives it to all.  Its traffic hardly grows with the ranks.
"""

import logging
from abc import ABC, abstractmethod
from collections.abc import Sequence

import torch

from comm_hooks.collectives.base import Transport
from comm_hooks.collectives.requests import AllGather, AllReduce, AllToAll, Round
from comm_hooks.compressors.base import Compressor
from comm_hooks.compressors.identity import Identity
from comm_hooks.layout import Layout
from comm_hooks.memory.base import Memory
from comm_hooks.memory.feedback import Feedback
from comm_hooks.randomness import Keys, fork_all
from comm_hooks.safeguard import Safeguard
from comm_hooks.shards import Shards
from comm_hooks.wire.payload import PayloadFormat
from comm_hooks.wire.stamp import Stamp

logger = logging.getLogger(__name__)


class Route(ABC):
    """How one layout's payloads travel.  Made with one compressor for each part of the layout."""

    @property
    @abstractmethod
    def traffic(self) -> int:
        """The bytes that each rank sends, and receives, in a round."""

    @abstractmethod
    def travel(
        self,
        keys: Sequence[Keys],
        stamp: Stamp,
        health: torch.Tensor,
        scale: float,
        feedback: Feedback | None,
        safeguard: Safeguard | None = None,
    ) -> Round[None]:
        """Replace the workspace's vectors by their mean over ranks; by NaN if one is not finite.

        Args:
            keys: one sequence per part of the layout, one key per row.
            stamp: of this bucket and step, equal on all ranks.
            health: 0 or NaN, float32 scalar: whether this rank's vectors are finite.
            scale: the factor by which the vectors are scaled at present.
            feedback: of this rank's memory; None without one.
            safeguard: of a place on this route; see :class:`~comm_hooks.safeguard.Safeguard`.
        """


class OneShot(Route):
    """One collective per round."""

    def __init__(
        self,
        layout: Layout,
        compressors: Sequence[Compressor],
        transport: Transport,
        *,
        sum_on_wire: bool,
    ) -> None:
        self._layout = layout
        self._transport = transport
        self._sum_on_wire = sum_on_wire
        self._matrices = [part.matrix for part in layout.parts()]
        self._format = PayloadFormat(
            [(c, *m.shape) for c, m in zip(compressors, self._matrices, strict=True)],
            transport.ranks,
            transport.rank,
            summed=sum_on_wire,
        )

    @property
    def traffic(self) -> int:
        request = AllReduce if self._sum_on_wire else AllGather
        payload = torch.empty(self._format.nbytes, dtype=torch.uint8, device="meta")
        return request(payload).traffic(self._transport.world_size)

    def travel(
        self,
        keys: Sequence[Keys],
        stamp: Stamp,
        health: torch.Tensor,
        scale: float,
        feedback: Feedback | None,
        safeguard: Safeguard | None = None,
    ) -> Round[None]:
        payload = self._format.encode(
            self._matrices,
            keys,
            health,
            stamp,
            residuals=feedback.residuals if feedback else None,
        )
        if self._sum_on_wire:
            if safeguard:
                safeguard.clip_([self._format.body(payload)])
            reply = total = yield AllReduce(payload.view(torch.float32))
            if safeguard:
                # A simulated world gives the same tensor to all ranks.
                total = total.clone()
            payloads = total.view(torch.uint8)[None]
            if safeguard:
                safeguard.add_noise_([self._format.body(payloads[0])])
        else:
            reply = payloads = yield AllGather(payload)
        health = self._transport.alike(
            "health", reply, lambda: self._format.health(payloads, stamp)
        )
        if feedback:
            feedback.settle(torch.isfinite(health))
        work, share = self._layout.work, 1 / self._transport.world_size

        def average() -> torch.Tensor:
            self._format.decode_sum(self._matrices, payloads, keys, alpha=share)
            return work

        if safeguard and not self._sum_on_wire:
            self._sum_clipped(payloads, keys, safeguard)
            work.mul_(share)
        elif safeguard:
            average()  # of what this rank has added noise to
        else:
            mean = self._transport.alike("mean", reply, average)
            if mean is not work:
                work.copy_(mean)
        spoil_(work, health)

    def _sum_clipped(
        self, payloads: torch.Tensor, keys: Sequence[Keys], safeguard: Safeguard
    ) -> None:
        """Decompress and clip one payload after the other; write the noised sum."""
        total = torch.zeros_like(self._layout.work)
        for rank, payload in enumerate(payloads):
            self._format.decode(self._matrices, payload, keys, rank)
            safeguard.clip_(self._matrices)
            total += self._layout.work
        self._layout.work.copy_(total)
        safeguard.add_noise_(self._matrices)


class Sharded(Route):
    """All-to-all, average, compress again, all-gather.

    Rank j owns the j-th of N equal ranges of the elements of every parameter
    (:class:`~comm_hooks.shards.Shards`).  ``memory`` keeps what the second compression left out of
    the owned shards; like every memory it belongs to this rank.

    With ``exact_uplink`` vectors reach the owners as they are, in float32, and only what the owners
    send is compressed.
    """

    def __init__(
        self,
        layout: Layout,
        compressors: Sequence[Compressor],
        transport: Transport,
        memory: Memory | None,
        *,
        exact_uplink: bool = False,
    ) -> None:
        self._layout = layout
        self._transport = transport
        self._memory = memory
        who = transport.ranks, transport.rank
        self._shards = Shards(layout, transport.world_size)
        self._owned = self._shards.owned
        shapes = [part.matrix.shape for part in self._owned.parts()]
        self._downlink = PayloadFormat(
            [(c, *shape) for c, shape in zip(compressors, shapes, strict=True)], *who
        )
        self._uplink = self._downlink
        if exact_uplink:
            self._uplink = PayloadFormat([(Identity(), *shape) for shape in shapes], *who)

    @property
    def traffic(self) -> int:
        nbytes = self._uplink.nbytes + self._downlink.nbytes
        return (self._transport.world_size - 1) * nbytes

    def travel(
        self,
        keys: Sequence[Keys],
        stamp: Stamp,
        health: torch.Tensor,
        scale: float,
        feedback: Feedback | None,
        safeguard: Safeguard | None = None,
    ) -> Round[None]:
        ranks, own = self._transport.world_size, self._transport.rank
        owned = [part.matrix for part in self._owned.parts()]
        # Of each shard.
        uplink = [fork_all(part, range(ranks)) for part in keys]
        downlink = [fork_all(part, range(ranks, 2 * ranks)) for part in keys]
        own_uplink, own_downlink = ([part[own] for part in link] for link in (uplink, downlink))

        if feedback:
            for part, residual in zip(self._layout.parts(), feedback.residuals, strict=True):
                if residual:
                    residual.add_to(part.matrix)
        shards = self._shards.cut()
        payloads = self._uplink.encode_all(
            shards,
            [part.ravel() for part in uplink],
            health,
            stamp,
            residuals=[None] * len(shards) if feedback else None,
            wholes=[part.matrix for part in self._layout.parts()],
        )
        received = yield AllToAll(payloads, final=False)

        health = self._uplink.health(received, stamp)
        # Noise belongs to the sum.
        share = 1.0 if safeguard else 1 / ranks
        self._uplink.decode_sum(owned, received, own_uplink, alpha=share)
        if safeguard:
            safeguard.add_noise_(owned)
            torch._foreach_mul_(owned, 1 / ranks)
        server = None
        if self._memory:
            norms = [row_norms(rows.matrix) for rows in self._owned.groups]
            key = int(own_downlink[0][0])
            server = Feedback(self._memory, self._owned, norms, scale, key)
        mean = self._downlink.encode(
            owned,
            own_downlink,
            health,
            stamp,
            residuals=server.residuals if server else None,
        )
        means = yield AllGather(mean)

        health = self._transport.alike(
            "health",
            means,
            lambda: self._downlink.health(means, stamp, senders="the owner of shard"),
        )
        accept = torch.isfinite(health)
        if server:
            server.settle(accept)
        if feedback:
            self._shards.join(shards)
            feedback.settle(accept)
        work = self._layout.work

        def join() -> torch.Tensor:
            self._downlink.decode_all(shards, means, [part.ravel() for part in downlink])
            self._shards.join(shards)
            return work

        mean_of_all = self._transport.alike("mean", means, join)
        if mean_of_all is not work:
            work.copy_(mean_of_all)
        spoil_(work, health)


def cheapest_route(
    layout: Layout,
    compressor: Compressor,
    exempt: Compressor,
    collectives: Sequence[str],
    transport: Transport,
    server_memory: Memory | None,
    *,
    exact_uplink: bool = False,
) -> Route:
    """Return the route over one of ``collectives`` that moves the fewest bytes.

    Where payloads can be summed they are: gathered ones, or shards, would move as many bytes at
    least, but for rounding and headers, and take more arithmetic.

    Args:
        exempt: compresses the parameters that ``compressor`` does not see.
        server_memory, exact_uplink: see :class:`Sharded`.
    """
    compressors = layout.compressors(compressor, exempt)
    routes: dict[str, Route] = {}
    for collective in ["all_reduce"] if "all_reduce" in collectives else collectives:
        if collective == "sharded":
            routes[collective] = Sharded(
                layout, compressors, transport, server_memory, exact_uplink=exact_uplink
            )
        else:
            sums = collective == "all_reduce"
            routes[collective] = OneShot(layout, compressors, transport, sum_on_wire=sums)
    # min() keeps the first of equals, and the simplest routes come first.
    chosen = min(routes, key=lambda name: routes[name].traffic)
    logger.info("%d elements travel by %s", layout.work.numel(), chosen)
    return routes[chosen]


def row_norms(matrix: torch.Tensor) -> torch.Tensor:
    """Return the norm of each row, (n, 1): zero or not, finite or not, in one pass."""
    return torch.stack(torch._foreach_norm(list(matrix.unbind())))[:, None]


def spoil_(vector: torch.Tensor, health: torch.Tensor) -> None:
    """Turn ``vector`` to NaN if ``health`` is NaN, without waiting for an accelerator."""
    if health.device.type != "cpu" or not torch.isfinite(health):
        vector.add_(health)
