"""One collective per round: an all-reduce of payloads that can be summed, or an all-gather."""

from collections.abc import Sequence

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
        summed: whether one all-reduce sums the payloads, which then must be linear; else every rank
            gets the payloads of all ranks, by one all-gather.
    """

    def __init__(
        self,
        layout: Layout,
        compressors: Sequence[Compressor],
        transport: Transport,
        seed: int,
        *,
        summed: bool,
    ) -> None:
        self._layout = layout
        self._transport = transport
        self._seed = seed
        self._is_summed = summed
        self._format = format_of(layout, compressors, transport, summed=summed)

    @property
    def traffic(self) -> int:
        payload = torch.empty(self._format.nbytes, dtype=torch.uint8, device="meta")
        request = (AllReduce if self._is_summed else AllGather)(payload)
        return request.traffic(self._transport.world_size)

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

    def _send(
        self, payload: torch.Tensor, noise_hook: NoiseHook | None
    ) -> Round[tuple[torch.Tensor, torch.Tensor]]:
        """Send a payload; return the collective's reply and the payloads (n, nbytes) to decode."""
        if not self._is_summed:
            payloads = yield AllGather(payload)
            return payloads, payloads
        if noise_hook:
            noise_hook.clip_([self._format.body(payload)])
        reply = yield AllReduce(payload.view(torch.float32))
        total = reply.view(torch.uint8)
        if noise_hook:
            total = total.clone()  # a simulated world replies with one tensor to all ranks
            noise_hook.add_noise_([self._format.body(total)])
        return reply, total[None]

    def _average(
        self,
        into: Layout,
        keys: Sequence[Keys],
        payloads: torch.Tensor,
        noise_hook: NoiseHook | None,
    ) -> None:
        """Write the mean over ranks to a layout."""
        matrices, share = into.matrices(), 1 / self._transport.world_size
        if noise_hook is None or self._is_summed:
            self._format.decode_sum(matrices, payloads, keys, alpha=share)
            return
        total = torch.zeros_like(into.work)
        for rank, payload in enumerate(payloads):
            self._format.decode(matrices, payload, keys, rank)
            noise_hook.clip_(matrices)
            total += into.work
        into.work.copy_(total)
        noise_hook.add_noise_(matrices)
        into.work.mul_(share)
