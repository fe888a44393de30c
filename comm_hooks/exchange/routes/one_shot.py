"""One collective per round: an all-reduce of payloads that can be summed, or an all-gather."""

from abc import abstractmethod
from collections.abc import Sequence
from typing import ClassVar

import torch

from comm_hooks.collectives.base import Transport
from comm_hooks.collectives.requests import AllGather, AllReduce, Round
from comm_hooks.compressors.base import Compressor
from comm_hooks.exchange.layout import Layout
from comm_hooks.exchange.message import Message, RoundContext
from comm_hooks.exchange.noise_hook import NoiseHook
from comm_hooks.exchange.routes.route import Route, fill_nan_, format_of
from comm_hooks.randomness import Keys


class OneShot(Route):
    """A route of a single collective: encode, send, and decode all payloads in rank order.

    Args:
        layout: holds the vectors.
        compressors: the compressors, one for each part of the layout.
        transport: connects the ranks.
        seed: the seed of all random keys.
    """

    request: ClassVar[type[AllReduce] | type[AllGather]]

    def __init__(
        self, layout: Layout, compressors: Sequence[Compressor], transport: Transport, seed: int
    ) -> None:
        self._layout = layout
        self._transport = transport
        self._seed = seed
        is_summed = self.request is AllReduce
        self._format = format_of(layout, compressors, transport, summed=is_summed)

    @property
    def traffic(self) -> int:
        payload = torch.empty(self._format.nbytes, dtype=torch.uint8, device="meta")
        return self.request(payload).traffic(self._transport.world_size)

    def reduce(self, context: RoundContext) -> Round[None]:
        transport, noise_hook = self._transport, context.noise_hook
        into = context.mean or self._layout
        message = Message.of(self._layout, context, seed=self._seed, rank=transport.rank)
        reply, payloads = yield from self._send(self._format.encode(message), noise_hook)
        health = transport.compute_once(
            "health", reply, lambda: self._format.check(payloads, context)
        )
        context.finish(message, health)

        def average() -> torch.Tensor:
            self._average(into, message.keys, payloads, noise_hook)
            return into.work

        # Each rank adds the noise itself, though it is equal on all of them.
        mean = average() if noise_hook else transport.compute_once("mean", reply, average)
        if mean is not into.work:
            into.work.copy_(mean)
        fill_nan_(into.work, health)
        message.give_back(into)

    @abstractmethod
    def _send(
        self, payload: torch.Tensor, noise_hook: NoiseHook | None
    ) -> Round[tuple[torch.Tensor, torch.Tensor]]:
        """Send a payload; return the collective's reply and the payloads (n, nbytes) to decode."""

    def _average(
        self,
        into: Layout,
        keys: Sequence[Keys],
        payloads: torch.Tensor,
        noise_hook: NoiseHook | None,
    ) -> None:
        """Write the mean over ranks to a layout."""
        share = 1 / self._transport.world_size
        self._format.decode_sum(into.matrices(), payloads, keys, alpha=share)


class Summed(OneShot):
    """A route of one all-reduce; the payloads of linear compressors are summed on the wire."""

    request = AllReduce

    def _send(
        self, payload: torch.Tensor, noise_hook: NoiseHook | None
    ) -> Round[tuple[torch.Tensor, torch.Tensor]]:
        if noise_hook:
            noise_hook.clip_([self._format.body(payload)])
        reply = yield AllReduce(payload.view(torch.float32))
        total = reply.view(torch.uint8)
        if noise_hook:
            total = total.clone()  # a simulated world replies with one tensor to all ranks
            noise_hook.add_noise_([self._format.body(total)])
        return reply, total[None]


class Gathered(OneShot):
    """A route of one all-gather; every rank decodes the payloads of all ranks."""

    request = AllGather

    def _send(
        self, payload: torch.Tensor, noise_hook: NoiseHook | None
    ) -> Round[tuple[torch.Tensor, torch.Tensor]]:
        payloads = yield AllGather(payload)
        return payloads, payloads

    def _average(
        self,
        into: Layout,
        keys: Sequence[Keys],
        payloads: torch.Tensor,
        noise_hook: NoiseHook | None,
    ) -> None:
        if noise_hook is None:
            super()._average(into, keys, payloads, noise_hook)
            return
        matrices, total = into.matrices(), torch.zeros_like(into.work)
        for rank, payload in enumerate(payloads):
            self._format.decode(matrices, payload, keys, rank)
            noise_hook.clip_(matrices)
            total += into.work
        into.work.copy_(total)
        noise_hook.add_noise_(matrices)
        into.work.mul_(1 / self._transport.world_size)
