"""Collectives made of messages between two ranks, over a process group of gloo.

Gloo's own collectives end the process with ``abort()`` if ranks call them with payloads of
different sizes, because one of them is in another round.  Messages have a tag: those of payloads of
different sizes never meet, and their receiver times out.  The algorithms are the same, and as fast.

All of them post receives before sends: a message to a posted receive is sent at once, and the
notice of a posted receive would wait behind this rank's own data on the same connection.
"""

import zlib
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import torch

from comm_hooks.collectives.failure_detection import CLOSED

# A rank passes on the first part of what it receives while the rest is still coming.
_SEGMENT_NBYTES = 1 << 20

_Segments = Sequence[tuple[torch.Tensor, Any]]
"""Parts of a payload, each with the work handle of its receive."""


class Rings:
    """Collectives in a ring: each rank receives from its left and sends to its right neighbour.

    Args:
        context: a ``ProcessGroupGloo`` of these ranks that only this object uses.
        rank, world_size: the rank of this process among these ranks, and their number.
    """

    def __init__(self, context: Any, rank: int, world_size: int) -> None:
        self._open_context = context
        self._rank = rank
        self._world_size = world_size

    @property
    def _context(self) -> Any:
        if self._open_context is None:
            raise RuntimeError(CLOSED)
        return self._open_context

    def close(self) -> None:
        """Close the connections, once no thread waits for a message any more.

        References to this object, such as that of an error's traceback, do not keep them open.
        """
        self._open_context = None

    def all_reduce_(self, payload: torch.Tensor) -> None:
        """Sum a 1-D payload over ranks, in place; the sum is bit-identical on all ranks.

        1. Cut it into N chunks, one per rank.  Chunk c starts at rank c and goes round the ring
           once; every rank adds its own values of it.
        2. The complete chunks go round once more.

        Every rank sends 2 (N - 1) chunks, each an N-th of the payload.
        """
        ranks, rank = self._world_size, self._rank
        reducing, gathering = _tag("reduce", payload), _tag("gather sums", payload)
        numel = payload.numel()
        bounds = [numel * chunk // ranks for chunk in range(ranks + 1)]
        chunks = [_segments(payload[a:b]) for a, b in pairwise(bounds)]
        # A step's chunk is added while that of the next one arrives.
        room = payload.new_empty(min(2, ranks - 1), -(-numel // ranks))

        def post(step: int) -> list[tuple[torch.Tensor, torch.Tensor, Any]]:
            own = chunks[(rank - step - 1) % ranks]
            length = sum(segment.numel() for segment in own)
            theirs = self._receive_all(_segments(room[step % 2, :length]), reducing)
            return [(mine, *segment) for mine, segment in zip(own, theirs, strict=True)]

        pending = post(0)
        # A chunk is complete only after this rank's share of it has arrived, and been read here.
        complete = [
            self._receive_all(chunks[(rank - step) % ranks], gathering) for step in range(ranks - 1)
        ]
        sends = [self._send(segment, reducing) for segment in chunks[rank]]
        for step in range(ranks - 1):
            is_last = step == ranks - 2
            following = [] if is_last else post(step + 1)
            for own, theirs, receive in pending:
                receive.wait()
                own += theirs
                sends.append(self._send(own, gathering if is_last else reducing))
            pending = following
        self._pass_on(complete, gathering, sends)

    def all_gather(self, payload: torch.Tensor) -> torch.Tensor:
        """Return the payloads of all ranks, (N, n); each payload goes round the ring once.

        Every rank sends N - 1 payloads.
        """
        ranks, rank = self._world_size, self._rank
        reply = payload.new_empty(ranks, payload.numel())
        tag = _tag("gather", payload)
        receives = [
            self._receive_all(_segments(reply[(rank - step - 1) % ranks]), tag)
            for step in range(ranks - 1)
        ]
        sends = [self._send(segment, tag) for segment in _segments(payload)]
        reply[rank] = payload
        self._pass_on(receives, tag, sends)
        return reply

    def all_to_all(self, rows: torch.Tensor) -> torch.Tensor:
        """Send row j of ``rows`` to rank j; return the rows received from all ranks, (N, n)."""
        ranks, rank = self._world_size, self._rank
        reply = torch.empty_like(rows, memory_format=torch.contiguous_format)
        reply[rank] = rows[rank]
        tag = _tag("to all", rows)
        others = [(rank + distance) % ranks for distance in range(1, ranks)]
        works = [self._context.recv([reply[other]], other, tag) for other in reversed(others)]
        works += [self._context.send([rows[other]], other, tag) for other in others]
        for work in works:
            work.wait()
        return reply

    def _pass_on(self, steps: Sequence[_Segments], tag: int, sends: list[Any]) -> None:
        """Pass arriving segments to the right neighbour, except in the last step of the ring."""
        for index, step in enumerate(steps):
            for segment, receive in step:
                receive.wait()
                if index < len(steps) - 1:
                    sends.append(self._send(segment, tag))
        for send in sends:
            send.wait()

    def _receive_all(self, segments: Sequence[torch.Tensor], tag: int) -> _Segments:
        left = (self._rank - 1) % self._world_size
        return [(segment, self._context.recv([segment], left, tag)) for segment in segments]

    def _send(self, segment: torch.Tensor, tag: int) -> Any:
        return self._context.send([segment], (self._rank + 1) % self._world_size, tag)


def _segments(chunk: torch.Tensor) -> Sequence[torch.Tensor]:
    return chunk.split(max(1, _SEGMENT_NBYTES // chunk.element_size())) if chunk.numel() else ()


def _tag(kind: str, payload: torch.Tensor) -> int:
    """Return the tag of a collective's messages: 31 bits of its kind and the payload's size."""
    return zlib.crc32(f"{kind} {payload.nbytes}".encode()) >> 1
