"""A compressed reduce-scatter, the first half of the sharded route, for the shards of FSDP2."""

from collections.abc import Sequence

import torch

from comm_hooks.collectives.base import Transport
from comm_hooks.collectives.requests import Round
from comm_hooks.compressors.base import Compressor
from comm_hooks.exchange.layout import Layout
from comm_hooks.exchange.message import Message, RoundContext
from comm_hooks.exchange.routes.route import fill_nan_, format_of
from comm_hooks.exchange.routes.sharded import scatter


class RaggedShards:
    """A compressed reduce-scatter: each rank gets the mean of its shard; sizes may differ.

    Args:
        layouts: the layout of each rank's shard, in rank order; they hold this rank's vectors.
        compressors: the compressors of each layout, one for each of its parts.
        transport: connects the ranks.
        seed: the seed of all random keys.
    """

    def __init__(
        self,
        layouts: Sequence[Layout],
        compressors: Sequence[Sequence[Compressor]],
        transport: Transport,
        seed: int,
    ) -> None:
        self._layouts = layouts
        self._transport = transport
        self._seed = seed
        pairs = zip(layouts, compressors, strict=True)
        self._formats = [format_of(layout, of_parts, transport) for layout, of_parts in pairs]
        # An all-to-all moves equal rows.
        self._nbytes = max(format_.nbytes for format_ in self._formats)

    @property
    def traffic(self) -> int:
        """The number of bytes that each rank sends in a round; it receives as many."""
        return (self._transport.world_size - 1) * self._nbytes

    def reduce(self, context: Sequence[RoundContext], *, factor: float = 1.0) -> Round[None]:
        """Return a round that writes ``factor`` times the mean to this rank's shard in its layout.

        Args:
            context: the settings of the round per shard; only their stamps (header words) differ.
        """
        ranks, own = self._transport.world_size, self._transport.rank
        messages = [
            Message.of(layout, of_shard, seed=self._seed, rank=own)
            for layout, of_shard in zip(self._layouts, context, strict=True)
        ]
        health = torch.stack([message.health for message in messages]).sum()
        payloads = health.new_zeros(ranks, self._nbytes, dtype=torch.uint8)
        for payload, format_, message in zip(payloads, self._formats, messages, strict=True):
            format_.encode(message, health=health, out=payload[: format_.nbytes])
        message, into = messages[own], context[own].mean or self._layouts[own]
        received, health = yield from scatter(payloads, self._formats[own], context[own])
        for each in messages:
            context[own].finish(each, health)
        self._formats[own].decode_sum(into.matrices(), received, message.keys, alpha=1 / ranks)
        fill_nan_(into.work, health)
        # No other rank has this mean.
        message.give_back(into, ranks=ranks, factor=factor)
        into.work.mul_(factor)
