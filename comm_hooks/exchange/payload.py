"""The one place where payloads are built and read.

A payload is one contiguous byte string per bucket and rank, of a size that all ranks can compute:

    header | rows of part 0 | rows of part 1 | ... | zeros up to a multiple of 8 bytes

One that is to be summed on the wire must be all float32, its header included: that is another one
(:mod:`comm_hooks.wire.summed_header`) than of payloads that are gathered
(:mod:`comm_hooks.wire.gathered_header`).  From either of them every rank learns whether all vectors
are finite and all ranks mean the same round, at no extra collective.
"""

from collections.abc import Sequence

import torch

from comm_hooks.compressors.base import Compressor
from comm_hooks.exchange.message import Message
from comm_hooks.kernels.residual import Residual
from comm_hooks.randomness import Draw, Keys
from comm_hooks.wire.gathered_header import GatheredHeader
from comm_hooks.wire.header import Header
from comm_hooks.wire.stamp import Stamp
from comm_hooks.wire.summed_header import SummedHeader


class PayloadFormat:
    """Where each part lies in a payload.

    Args:
        parts: (compressor, number of rows, elements per row) of each part.
        ranks: those that take part, as users count them, in their order.
        place: of this rank among them.
        summed: the payloads are summed on the wire; all compressors must be linear.
    """

    def __init__(
        self,
        parts: Sequence[tuple[Compressor, int, int]],
        ranks: Sequence[int],
        place: int,
        *,
        summed: bool = False,
    ) -> None:
        self._compressors = [compressor for compressor, _, _ in parts]
        self._world_size, self._place = len(ranks), place
        self._header: Header = (SummedHeader if summed else GatheredHeader)(ranks, place)
        self._slices: list[tuple[int, int, int]] = []
        position = self._header.nbytes
        for compressor, rows, numel in parts:
            nbytes = rows * compressor.payload_nbytes(numel, world_size=self._world_size)
            self._slices.append((position, position + nbytes, rows))
            position += nbytes
        self._end = position
        self.nbytes = -(-position // 8) * 8

    def encode(
        self,
        message: Message,
        *,
        health: torch.Tensor | None = None,
        out: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Return the payload (nbytes,), uint8, of a message.

        With a memory the message's matrices keep, in place, what the payload does not say.

        Args:
            health: what takes the place of the message's own.
            out: where to put it.
        """
        return self.encode_all(
            [matrix[None] for matrix in message.matrices],
            message.keys,
            message.health if health is None else health,
            message.stamp,
            residuals=message.residuals,
            out=None if out is None else out[None],
        )[0]

    def encode_all(
        self,
        stacks: Sequence[torch.Tensor],
        keys: Sequence[Keys],
        health: torch.Tensor,
        stamp: Stamp,
        *,
        residuals: Sequence[Residual | None] | None = None,
        wholes: Sequence[torch.Tensor] | None = None,
        out: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Return M payloads (M, nbytes) of stacks of M matrices; like M calls of :meth:`encode`.

        Args:
            stacks: for each part, contiguous matrices (M, rows, numel).
            keys: for each part, those of all rows, (M * rows,).
            health: float32 scalar, 0 if the matrices are finite, else NaN.
            residuals: for each part, what is to be added to its matrices first, if anything; these
                then keep, in place, what the payloads do not say.  None: they stay as they are.
            wholes: if the M matrices are shards, the matrix of each part that was cut into them.
        """
        count = len(stacks[0])
        if out is None:
            out = torch.empty(count, self.nbytes, dtype=torch.uint8, device=health.device)
        compressors = self._compressors
        if wholes is not None:
            pairs = zip(compressors, wholes, strict=True)
            compressors = [compressor.for_shards(whole, count) for compressor, whole in pairs]
        for compressor, (start, stop, _), stack, part_keys, residual in zip(
            compressors,
            self._slices,
            stacks,
            keys,
            residuals or [None] * len(stacks),
            strict=True,
        ):
            rows, draw = stack.flatten(0, 1), self._draw(part_keys, self._place)
            if residuals is None:
                coded = compressor.encode(rows, draw)
            else:
                coded = compressor.extract(rows, draw, residual)
            out[:, start:stop].view(coded.dtype).copy_(coded.view(count, -1))
        out[:, self._end :] = 0
        self._header.write_(out, stamp, health)
        return out

    def body(self, payload: torch.Tensor) -> torch.Tensor:
        """Return a view of a payload (nbytes,) without its header, float32."""
        return payload[self._header.nbytes : self._end].view(torch.float32)

    def health(
        self, payloads: torch.Tensor, stamp: Stamp, *, senders: str = "rank"
    ) -> torch.Tensor:
        """Return 0 if all ranks' vectors were finite, else NaN, and check the headers.

        See :meth:`~comm_hooks.wire.header.Header.health`.
        """
        return self._header.health(payloads, stamp, senders)

    def decode_sum(
        self,
        matrices: Sequence[torch.Tensor],
        payloads: torch.Tensor,
        keys: Sequence[Keys],
        *,
        alpha: float,
    ) -> None:
        """Write ``alpha`` times the sum of all ranks' payloads (N, nbytes) to matrices."""
        for compressor, (start, stop, rows), matrix, part_keys in zip(
            self._compressors, self._slices, matrices, keys, strict=True
        ):
            octets = payloads[:, start:stop].unflatten(1, (rows, -1))
            compressor.decode_sum(matrix, octets, self._draw(part_keys), alpha=alpha)

    def decode(
        self,
        matrices: Sequence[torch.Tensor],
        payload: torch.Tensor,
        keys: Sequence[Keys],
        rank: int,
    ) -> None:
        """Write what the payload of ``rank`` stands for to matrices."""
        for compressor, (start, stop, rows), matrix, part_keys in zip(
            self._compressors, self._slices, matrices, keys, strict=True
        ):
            octets = payload[start:stop].view(rows, -1)
            compressor.decode(matrix, octets, self._draw(part_keys, rank))

    def decode_all(
        self,
        stacks: Sequence[torch.Tensor],
        payloads: torch.Tensor,
        keys: Sequence[Keys],
    ) -> None:
        """Write M decompressed payloads (M, nbytes) to stacks; like M calls of :meth:`decode`.

        Not for compressors that are ``per_rank``.

        Args:
            stacks, keys: see :meth:`encode_all`.
        """
        for compressor, (start, stop, rows), stack, part_keys in zip(
            self._compressors, self._slices, stacks, keys, strict=True
        ):
            octets = payloads[:, start:stop].reshape(len(payloads) * rows, -1)
            compressor.decode(stack.flatten(0, 1), octets, self._draw(part_keys))

    def _draw(self, keys: Keys, rank: int = 0) -> Draw:
        return Draw(keys, rank, self._world_size)
