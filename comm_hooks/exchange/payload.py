"""Build and read payloads.

A payload is one contiguous byte string per bucket and rank, of a size that all ranks can compute.
Each part is a matrix of vectors with one compressor:

    header | rows of part 0 | rows of part 1 | ... | zeros up to a multiple of 8 bytes

A payload that is summed on the wire is all float32, its header included
(:mod:`comm_hooks.wire.summed_header`); other payloads have another header
(:mod:`comm_hooks.wire.gathered_header`).  Either header tells every rank, at no extra collective,
whether all vectors are finite and all ranks are in the same round.
"""

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from comm_hooks.compressors.base import Compressor
from comm_hooks.exchange.message import Message, RoundContext
from comm_hooks.kernels.residual import Residual
from comm_hooks.profiling import COMPRESS, DECODE, record_function
from comm_hooks.randomness import Draw, Keys
from comm_hooks.wire.gathered_header import GatheredHeader
from comm_hooks.wire.header import Header
from comm_hooks.wire.stamp import Stamp
from comm_hooks.wire.summed_header import SummedHeader


class PayloadFormat:
    """Encodes matrices as one payload, decodes it, and knows the offset of each matrix in it.

    Args:
        parts: (compressor, number of rows, elements per row) of each matrix.
        ranks: the global ranks of the participants, in order.
        place: the index of this rank among them.
        summed: whether payloads are summed on the wire; all compressors must be linear.
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
        self, message: Message, *, health: Tensor | None = None, out: Tensor | None = None
    ) -> Tensor:
        """Return the payload (nbytes,), uint8, of a message.

        With error feedback the matrices of the message become, in place, the new residuals.

        Args:
            health: replaces :attr:`Message.health`.
            out: a tensor that receives the payload.
        """
        return self.encode_all(
            [matrix[None] for matrix in message.matrices],
            message.keys,
            message.health if health is None else health,
            message.stamp,
            residuals=message.residuals,
            out=None if out is None else out[None],
        )[0]

    @record_function(COMPRESS)
    def encode_all(
        self,
        stacks: Sequence[Tensor],
        keys: Sequence[Keys],
        health: Tensor,
        stamp: Stamp,
        *,
        residuals: Sequence[Residual | None] | None = None,
        wholes: Sequence[Tensor] | None = None,
        out: Tensor | None = None,
    ) -> Tensor:
        """Return M payloads (M, nbytes), uint8, of stacks of M matrices.

        Args:
            stacks: for each part, contiguous matrices (M, rows, numel).
            keys: for each part, the random keys of all rows, (M * rows,).
            health: float32 scalar, 0 if the matrices are finite, else NaN.
            stamp: the stamp of this rank.
            residuals: the residual of each part, added to its matrices first; the matrices become,
                in place, the new residuals.  None: the matrices do not change.
            wholes: if the M matrices are shards, the matrix of each part that was cut into them.
            out: a tensor that receives the payloads.
        """
        count = len(stacks[0])
        if out is None:
            out = torch.empty(count, self.nbytes, dtype=torch.uint8, device=health.device)
        for number, (compressor, octets, draw) in enumerate(self._parts(out, keys, self._place)):
            rows = stacks[number].flatten(0, 1)
            if wholes is not None:
                compressor = compressor.for_shards(wholes[number], count)
            if residuals is None:
                coded = compressor.encode(rows, draw)
            else:
                coded = compressor.extract(rows, draw, residuals[number])
            octets.view(coded.dtype).copy_(coded.view_as(octets.view(coded.dtype)))
        out[:, self._end :] = 0
        self._header.write_(out, stamp, health)
        return out

    def body(self, payload: Tensor) -> Tensor:
        """Return a view of a payload (nbytes,) without its header, float32."""
        return payload[self._header.nbytes : self._end].view(torch.float32)

    def check(self, payloads: Tensor, context: RoundContext, *, senders: str = "rank") -> Tensor:
        """Check the payloads' headers; return 0 if all ranks' vectors were finite, else NaN.

        See :meth:`~comm_hooks.wire.header.Header.check`.
        """
        return self._header.check(payloads, context.stamp, context.checks, senders)

    @record_function(DECODE)
    def decode_sum(
        self, matrices: Sequence[Tensor], payloads: Tensor, keys: Sequence[Keys], *, alpha: float
    ) -> None:
        """Write ``alpha`` times the sum of N decompressed payloads (N, nbytes) to the matrices."""
        for matrix, (compressor, octets, draw) in zip(
            matrices, self._parts(payloads, keys), strict=True
        ):
            compressor.decode_sum(matrix, octets, draw, alpha=alpha)

    @record_function(DECODE)
    def decode(
        self, matrices: Sequence[Tensor], payload: Tensor, keys: Sequence[Keys], rank: int
    ) -> None:
        """Write the decompressed payload of ``rank``, (nbytes,), to the matrices."""
        for matrix, (compressor, octets, draw) in zip(
            matrices, self._parts(payload[None], keys, rank), strict=True
        ):
            compressor.decode(matrix, octets[0], draw)

    @record_function(DECODE)
    def decode_all(self, stacks: Sequence[Tensor], payloads: Tensor, keys: Sequence[Keys]) -> None:
        """Write M decompressed payloads (M, nbytes) to stacks of M matrices.

        Not for compressors that are ``per_rank``.

        Args:
            stacks, keys: see :meth:`encode_all`.
        """
        for stack, (compressor, octets, draw) in zip(
            stacks, self._parts(payloads, keys), strict=True
        ):
            compressor.decode(stack.flatten(0, 1), octets.flatten(0, 1), draw)

    def _parts(
        self, payloads: Tensor, keys: Sequence[Keys], rank: int = 0
    ) -> Iterator[tuple[Compressor, Tensor, Draw]]:
        """Yield each part's compressor, view (M, rows, nbytes) of the payloads, and random draw."""
        for compressor, (start, stop, rows), part_keys in zip(
            self._compressors, self._slices, keys, strict=True
        ):
            octets = payloads[:, start:stop].unflatten(1, (rows, (stop - start) // rows))
            yield compressor, octets, Draw(part_keys, rank, self._world_size)
