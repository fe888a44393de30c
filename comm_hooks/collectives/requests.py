"""What a round asks of the network.

A round is a generator that yields requests and is sent the replies.  It never touches a network
itself, so that the same code runs over torch.distributed, in a simulated world, blocking or
asynchronously: whoever drives it decides.
"""

from collections.abc import Generator
from dataclasses import dataclass
from typing import Any, TypeVar

import torch

Result = TypeVar("Result")
Round = Generator["Request", Any, Result]


@dataclass(frozen=True)
class Request:
    """One collective.

    ``final`` marks the last one of a round.  Only that one may be run asynchronously: on gloo a
    collective issued from another one's callback hangs or, worse, meets the wrong partner.
    """

    payload: Any
    final: bool = True

    def traffic(self, world_size: int) -> int:
        """Return the bytes that each rank sends, and receives, without transport headers."""
        raise NotImplementedError


@dataclass(frozen=True)
class AllReduce(Request):
    """Sum a float32 payload over ranks; reply: the sum, bit-identical on all ranks."""

    payload: torch.Tensor

    def traffic(self, world_size: int) -> int:
        # A ring: every rank passes on N - 1 of N chunks twice.  Chunks differ by a few bytes when
        # N does not divide the payload.
        return 2 * (world_size - 1) * self.payload.nbytes // world_size


@dataclass(frozen=True)
class AllGather(Request):
    """Give every rank all payloads; reply: (N, nbytes), uint8, in rank order."""

    payload: torch.Tensor

    def traffic(self, world_size: int) -> int:
        return (world_size - 1) * self.payload.nbytes


@dataclass(frozen=True)
class AllToAll(Request):
    """Give rank j row j of every rank's payload (N, nbytes); reply: (N, nbytes) in rank order."""

    payload: torch.Tensor

    def traffic(self, world_size: int) -> int:
        return (world_size - 1) * self.payload.nbytes // world_size


@dataclass(frozen=True)
class AllGatherObject(Request):
    """Give every rank the small picklable ``payload`` of all; reply: a list in rank order.

    For settings, before the first gradient; not counted as traffic.
    """

    final: bool = False

    def traffic(self, world_size: int) -> int:
        return 0
