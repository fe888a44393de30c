"""What a round asks of the network.

A round is a generator that yields requests and is sent the replies.  It never touches a network
itself, so that the same code runs over torch.distributed, in a simulated world, blocking or
asynchronously: whoever drives it decides.
"""

from collections.abc import Generator
from dataclasses import dataclass
from typing import Any, Literal, TypeVar

import torch

GroupKind = Literal["node", "across"]
Result = TypeVar("Result")
Round = Generator["Request", Any, Result]


@dataclass(frozen=True)
class Group:
    """Some of the ranks, of whom each ``ranks_per_node`` that follow each other share a node.

    Args:
        kind: ``"node"``: the ranks of one node; ``"across"``: the ranks at the same place in each
            node.
        ranks_per_node: a divisor of the number of ranks.
    """

    kind: GroupKind
    ranks_per_node: int

    def members(self, rank: int, world_size: int) -> range:
        """Return the ranks of the one group of this kind to which ``rank`` belongs, ascending."""
        place = rank % self.ranks_per_node
        if self.kind == "node":
            return range(rank - place, rank - place + self.ranks_per_node)
        return range(place, world_size, self.ranks_per_node)


@dataclass(frozen=True)
class Request:
    """One collective.

    ``final`` marks the last one of a round, after which only arithmetic is left.  ``group`` says
    among whom: all ranks if None.  What is said of ranks below is then said of the group's members.
    """

    payload: Any
    final: bool = True
    group: Group | None = None

    def traffic(self, world_size: int) -> int:
        """Return the bytes that each rank sends, and receives, without transport headers.

        Args:
            world_size: how many ranks take part.
        """
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
