"""Two legs: an all-to-all to the owners of shards, and an all-gather of their means."""

from collections.abc import Sequence
from dataclasses import replace

import torch

from comm_hooks.collectives.base import Transport
from comm_hooks.collectives.requests import AllGather, AllToAll, Round
from comm_hooks.compressors.base import Compressor
from comm_hooks.compressors.identity import Identity
from comm_hooks.exchange.layout import Layout
from comm_hooks.exchange.message import Message, RoundContext
from comm_hooks.exchange.payload import PayloadFormat
from comm_hooks.exchange.routes.route import Route, fill_nan_, format_of
from comm_hooks.exchange.shards import Shards
from comm_hooks.memory.base import Memory
from comm_hooks.randomness import fork_all


class Sharded(Route):
    """Every rank owns a shard of each parameter: traffic hardly grows with the number of ranks.

    Rank j owns the j-th of N equal ranges of the elements of every parameter
    (:class:`~comm_hooks.exchange.shards.Shards`).

    Args:
        layout, compressors, transport, seed: as for other routes.
        memory: keeps the residuals of the second compression, of the shard that this rank owns.
        downlink: the compressors of the means.
        exact_uplink: whether vectors go to owners in float32, so that only means are compressed.
    """

    def __init__(
        self,
        layout: Layout,
        compressors: Sequence[Compressor],
        transport: Transport,
        seed: int,
        memory: Memory | None,
        *,
        downlink: Sequence[Compressor],
        exact_uplink: bool,
    ) -> None:
        self._layout = layout
        self._transport = transport
        self._seed = seed
        self._memory = memory
        self._shards = Shards(layout, transport.world_size)
        self._owned = self._shards.owned
        if exact_uplink:
            compressors = [Identity()] * len(self._owned.parts())
        self._uplink = format_of(self._owned, compressors, transport)
        self._downlink = format_of(self._owned, downlink, transport)

    @property
    def traffic(self) -> int:
        nbytes = self._uplink.nbytes + self._downlink.nbytes
        return (self._transport.world_size - 1) * nbytes

    def reduce(self, context: RoundContext) -> Round[None]:
        ranks, own = self._transport.world_size, self._transport.rank
        message = Message.of(self._layout, context, seed=self._seed, rank=own)
        # Of each shard.
        uplink = [fork_all(part, range(ranks)) for part in message.keys]
        downlink = [fork_all(part, range(ranks, 2 * ranks)) for part in message.keys]
        message.add_residuals()
        shards = self._shards.cut()
        payloads = self._uplink.encode_all(
            shards,
            [part.ravel() for part in uplink],
            message.health,
            context.stamp,
            residuals=message.residuals,
            wholes=message.matrices,
        )
        owned = self._owned.matrices()
        received, health = yield from scatter(payloads, self._uplink, context)
        # Noise belongs to the sum.
        share = 1.0 if context.noise_hook else 1 / ranks
        self._uplink.decode_sum(owned, received, [part[own] for part in uplink], alpha=share)
        if context.noise_hook:
            context.noise_hook.add_noise_(owned)
            torch._foreach_mul_(owned, 1 / ranks)

        own_keys = [part[own] for part in downlink]
        of_owner = replace(context, memory=self._memory, verify=False)
        passed_on = Message(self._owned, own_keys, int(own_keys[0][0]), of_owner)
        means = yield AllGather(self._downlink.encode(passed_on, health=health))

        health = self._transport.compute_once(
            "health",
            means,
            lambda: self._downlink.check(means, context, senders="the owner of shard"),
        )
        context.finish(passed_on, health)
        if context.memory:
            self._shards.join(shards, self._layout)
            context.finish(message, health)
        into = context.mean or self._layout

        def join() -> torch.Tensor:
            self._downlink.decode_all(shards, means, [part.ravel() for part in downlink])
            self._shards.join(shards, into)
            return into.work

        mean = self._transport.compute_once("mean", means, join)
        if mean is not into.work:
            into.work.copy_(mean)
        fill_nan_(into.work, health)
        message.give_back(into)


def scatter(
    payloads: torch.Tensor, format_: PayloadFormat, context: RoundContext
) -> Round[tuple[torch.Tensor, torch.Tensor]]:
    """Return the first leg of a round, in which each rank gets all payloads for its shard.

    Args:
        payloads: one for each rank, (N, nbytes), uint8; may be longer than ``format_``.
        format_: the format of the payloads for this rank.
        context: the settings of the round for the shard of this rank.

    Returns:
        The payloads of all ranks, and 0 if their vectors were finite, else NaN.
    """
    received = yield AllToAll(payloads)
    received = received[:, : format_.nbytes]
    return received, format_.check(received, context)
