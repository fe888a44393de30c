"""The one place where payloads are built and read.

A payload is one contiguous byte string per bucket and rank, of a size that all ranks can compute:

    header (16 bytes, :mod:`comm_hooks.wire.header`) | rows of part 0 | rows of part 1 | ...

One that is to be summed on the wire must be all float32; its header is only

    health (float32) | ...

which is 0 when all elements of the rank's vector are finite, else NaN.  Either way every rank
learns whether any of them is not, at no extra collective.
"""

from collections.abc import Sequence

import torch

from comm_hooks.compressors.base import Compressor
from comm_hooks.kernels.residual import Residual
from comm_hooks.randomness import Keys
from comm_hooks.wire.header import HEADER_NBYTES, HeaderCheck, Stamp, write_headers_

SUMMED_HEADER_NBYTES = 4


class PayloadFormat:
    """Where each part lies in a payload.

    Args:
        parts: (compressor, number of rows, elements per row) of each part.
        world_size: how many ranks take part.
        summed: the payloads are summed on the wire; all compressors must be linear.
    """

    def __init__(
        self,
        parts: Sequence[tuple[Compressor, int, int]],
        world_size: int,
        *,
        summed: bool = False,
    ) -> None:
        self._compressors = [compressor for compressor, _, _ in parts]
        self._world_size = world_size
        self._summed = summed
        self._check = HeaderCheck()
        self._slices: list[tuple[int, int, int]] = []
        self.header_nbytes = SUMMED_HEADER_NBYTES if summed else HEADER_NBYTES
        position = self.header_nbytes
        for compressor, rows, numel in parts:
            nbytes = rows * compressor.payload_nbytes(numel, world_size=world_size)
            self._slices.append((position, position + nbytes, rows))
            position += nbytes
        self.nbytes = position

    def encode(
        self,
        matrices: Sequence[torch.Tensor],
        keys: Sequence[Keys],
        rank: int,
        health: torch.Tensor,
        stamp: Stamp,
        *,
        residuals: Sequence[Residual | None] | None = None,
        out: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Return the payload (nbytes,), uint8, of one matrix and its keys per part.

        Args:
            health: float32 scalar, 0 if the matrices are finite, else NaN.
            residuals: for each part, what is to be added to its matrix first, if anything; the
                matrix then keeps, in place, what the payload does not say.  None: matrices stay as
                they are.
        """
        return self.encode_all(
            [matrix[None] for matrix in matrices],
            keys,
            rank,
            health,
            stamp,
            residuals=residuals,
            out=None if out is None else out[None],
        )[0]

    def encode_all(
        self,
        stacks: Sequence[torch.Tensor],
        keys: Sequence[Keys],
        rank: int,
        health: torch.Tensor,
        stamp: Stamp,
        *,
        residuals: Sequence[Residual | None] | None = None,
        out: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Return M payloads (M, nbytes) of stacks of M matrices; like M calls of :meth:`encode`.

        Args:
            stacks: for each part, contiguous matrices (M, rows, numel).
            keys: for each part, those of all rows, (M * rows,).
        """
        count = len(stacks[0])
        if out is None:
            out = torch.empty(count, self.nbytes, dtype=torch.uint8, device=health.device)
        for compressor, (start, stop, _), stack, part_keys, residual in zip(
            self._compressors,
            self._slices,
            stacks,
            keys,
            residuals or [None] * len(stacks),
            strict=True,
        ):
            rows, how = stack.flatten(0, 1), (part_keys, rank, self._world_size)
            if residuals is None:
                coded = compressor._compress(rows, *how)
            elif residual is None:
                coded = compressor._extract(rows, *how)
            else:
                coded = compressor._extract_sum(rows, residual, *how)
            out[:, start:stop].view(coded.dtype).copy_(coded.view(count, -1))
        if self._summed:
            out[:, :SUMMED_HEADER_NBYTES].view(torch.float32).copy_(health)
        else:
            write_headers_(out, stamp, health)
        return out

    def health(
        self, payloads: torch.Tensor, stamp: Stamp, *, senders: str = "rank"
    ) -> torch.Tensor:
        """Return 0 if all ranks' vectors were finite, else NaN, and check the headers.

        Args:
            payloads: (N, nbytes), uint8, in rank order, or (1, nbytes) that were summed.
            stamp: as :meth:`encode` was given on this rank.
            senders: what an error calls them.

        Raises:
            PayloadError: if a payload is not what this rank expects.
        """
        if self._summed:
            return payloads[0, :SUMMED_HEADER_NBYTES].view(torch.float32)[0]
        return self._check.health(payloads, stamp, senders)

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
            compressor._decode_sum(matrix, octets, part_keys, self._world_size, alpha)

    def decode(
        self,
        matrices: Sequence[torch.Tensor],
        payload: torch.Tensor,
        keys: Sequence[Keys],
        rank: int,
        *,
        alpha: float = 1.0,
        add: bool = False,
    ) -> None:
        """Write ``alpha`` times the decompressed payload of ``rank`` to, or add it to, matrices."""
        for compressor, (start, stop, rows), matrix, part_keys in zip(
            self._compressors, self._slices, matrices, keys, strict=True
        ):
            octets = payload[start:stop].view(rows, -1)
            compressor._decode(matrix, octets, part_keys, rank, self._world_size, alpha, add)

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
            compressor._decode(
                stack.flatten(0, 1), octets, part_keys, 0, self._world_size, 1.0, add=False
            )
