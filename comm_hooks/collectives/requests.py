"""The collectives that a round can request.

A round is a generator that yields requests and receives the replies.  It never uses a network
itself, so the same code runs over torch.distributed or in a simulated world, blocking or
asynchronously, as its driver decides.
"""

import json
from collections.abc import Callable, Generator
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, TypeVar

import torch

from comm_hooks.errors import PayloadError

GroupKind = Literal["node", "across"]
Result = TypeVar("Result")
Round = Generator["Request", Any, Result]

# Settings are thousands of bytes: a larger length is not a length.
_MOST_OBJECT_BYTES = 1 << 28


@dataclass(frozen=True)
class Group:
    """A subset of the ranks, where every ``ranks_per_node`` consecutive ranks share a node.

    Args:
        kind: ``"node"``: the ranks of one node; ``"across"``: those at one place in each node.
        ranks_per_node: a divisor of the number of ranks.
    """

    kind: GroupKind
    ranks_per_node: int

    def members(self, rank: int, world_size: int) -> range:
        """Return the ranks, ascending, of the group of this kind that includes ``rank``."""
        place = rank % self.ranks_per_node
        if self.kind == "node":
            return range(rank - place, rank - place + self.ranks_per_node)
        return range(place, world_size, self.ranks_per_node)


@dataclass(frozen=True)
class Request:
    """A collective that a round requests.

    ``group`` restricts the collective to some ranks; None: all ranks.
    """

    payload: Any
    group: Group | None = None
    _name: ClassVar[str]

    def traffic(self, world_size: int) -> int:
        """Return the number of bytes that each rank sends and receives, without transport headers.

        Args:
            world_size: the number of participating ranks.
        """
        raise NotImplementedError

    def __str__(self) -> str:
        among = {"node": " inside a node", "across": " between nodes"}
        where = among[self.group.kind] if self.group else ""
        return f"an {self._name} of {self.payload.nbytes} bytes{where}"


@dataclass(frozen=True)
class AllReduce(Request):
    """Sum a float32 payload over ranks; reply: the sum, bit-identical on all ranks."""

    payload: torch.Tensor
    _name: ClassVar[str] = "all-reduce"

    def traffic(self, world_size: int) -> int:
        # A ring: every rank passes on N - 1 of N chunks twice.  Chunks differ by a few bytes when
        # N does not divide the payload.
        return 2 * (world_size - 1) * self.payload.nbytes // world_size


@dataclass(frozen=True)
class AllGather(Request):
    """Give every rank the payloads of all N ranks; reply: (N, nbytes), uint8, in rank order."""

    payload: torch.Tensor
    _name: ClassVar[str] = "all-gather"

    def traffic(self, world_size: int) -> int:
        return (world_size - 1) * self.payload.nbytes


@dataclass(frozen=True)
class AllToAll(Request):
    """Give rank j row j of all ranks' payloads (N, nbytes); reply: these rows, in rank order."""

    payload: torch.Tensor
    _name: ClassVar[str] = "all-to-all"

    def traffic(self, world_size: int) -> int:
        return (world_size - 1) * self.payload.nbytes // world_size


@dataclass(frozen=True)
class AllGatherObject(Request):
    """Give every rank the plain values of all ranks; reply: a list in rank order.

    Values are sent as JSON, never pickled: tuples come back as lists.  For comparisons of settings
    before the first exchange of gradients; not counted as traffic.

    ``about`` names the compared values in errors.  ``may_be_alone``: perhaps only some ranks make
    this comparison (a rank has made its optimizer again), so that a collective might hang.
    """

    about: str = "settings"
    may_be_alone: bool = False

    def traffic(self, world_size: int) -> int:
        return 0

    def __str__(self) -> str:
        return f"a comparison of {self.about}"


def ask(request: Request) -> Round[Any]:
    """Return a round of this one collective; the result of the round is the reply."""
    return (yield request)


def encoded(value: Any) -> torch.Tensor:
    """Return plain values as JSON text in a 1-D uint8 tensor."""
    return torch.frombuffer(bytearray(json.dumps(value).encode()), dtype=torch.uint8)


def decoded(octets: torch.Tensor | bytes) -> Any:
    """Return the plain values of JSON text in bytes, or in a tensor from :func:`encoded`.

    Raises:
        PayloadError: if the bytes are damaged.
    """
    text = bytes(octets.cpu().numpy()) if isinstance(octets, torch.Tensor) else octets
    try:
        return json.loads(text)
    except ValueError:
        raise PayloadError(
            "a rank sent settings that cannot be read: probably ranks are in different calls, or "
            "run different versions. Make all ranks call the exchange equally often and in the "
            "same order"
        ) from None


def gather_objects(perform: Callable[[Request], torch.Tensor], own: torch.Tensor) -> list[Any]:
    """Return the values of all ranks, by two all-gathers: of the lengths, then of the bytes.

    Args:
        perform: carries out an :class:`AllGather` among the ranks.
        own: the value of this rank from :func:`encoded`, on a device that the network reads.
    """
    length = torch.tensor([own.numel()], device=own.device).view(torch.uint8)
    lengths = perform(AllGather(length)).view(torch.int64).flatten().tolist()
    longest = max(lengths)
    if not all(0 < length <= _MOST_OBJECT_BYTES for length in lengths):
        raise PayloadError(
            "ranks did not all compare their settings at the same time: make all ranks call the "
            "exchange equally often and in the same order"
        )
    padded = torch.nn.functional.pad(own, (0, longest - own.numel()))
    rows = perform(AllGather(padded))
    return [decoded(row[:length]) for row, length in zip(rows, lengths, strict=True)]
