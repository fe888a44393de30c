"""A transport without a network, which records collectives and the arithmetic between them."""

import time
from collections.abc import Sequence
from typing import Any

import torch

from comm_hooks.collectives import Transport
from comm_hooks.collectives.requests import AllGather, AllGatherObject, AllReduce, AllToAll, Request
from comm_hooks.launchers.advise.cost_model import Collective, Round
from comm_hooks.wire.summed_header import MARKS_START


class Echo(Transport):
    """The transport of rank 0 of N simulated ranks: all ranks send copies of its own payload.

    Args:
        world_size: N, the number of ranks.
        device: the device of the payloads.
    """

    def __init__(self, world_size: int, device: torch.device) -> None:
        self.rank = 0
        self.world_size = world_size
        self._device = device
        self.start_noting()

    @property
    def ranks(self) -> Sequence[int]:
        return [0] * self.world_size

    def start_noting(self) -> None:
        """Forget the recorded collectives, and start the clock."""
        self._collectives: list[Collective] = []
        self._encode, self._since = 0.0, self.clock()

    def stop(self) -> Round:
        """Return the collectives and the seconds of arithmetic since :meth:`start_noting`."""
        return Round(tuple(self._collectives), self._encode, self.clock() - self._since)

    def clock(self) -> float:
        """Return the time in seconds, after waiting for the device."""
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        return time.perf_counter()

    def perform(self, request: Request) -> Any:
        self._encode += self.clock() - self._since
        reply = self._answer(request)
        self._since = self.clock()
        return reply

    def _answer(self, request: Request) -> Any:
        payload, ranks = request.payload, self.world_size
        if request.group:
            raise ValueError("advise cannot predict collective='hierarchical': use another one")
        if isinstance(request, AllGatherObject):
            return [payload] * ranks
        assert isinstance(request, AllReduce | AllGather | AllToAll)
        self._collectives.append(Collective.of(request, ranks))
        if isinstance(request, AllReduce):
            total = payload * ranks
            # The header has one mark per rank, which must not be multiplied.
            total[MARKS_START : MARKS_START + ranks] = payload[MARKS_START]
            return payload.copy_(total)
        row = payload if isinstance(request, AllGather) else payload[0]
        return row.expand(ranks, -1)
