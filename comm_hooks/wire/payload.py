"""The one place where payloads are built and read.

A payload is one contiguous byte string per bucket and rank, of a size that all ranks can compute:

    health (float32) | rows of part 0 | rows of part 1 | ...

``health`` is 0 when all elements of the rank's vector are finite, else NaN: the sum over ranks
tells every rank whether any of them is not, at no extra collective.
"""

from collections.abc import Sequence

import torch

from comm_hooks.compressors.base import Compressor

HEADER_NBYTES = 4


class PayloadFormat:
    """Where each part lies in a payload.

    Args:
        parts: (compressor, number of rows, elements per row) of each part.
        world_size: how many ranks take part.
    """

    def __init__(self, parts: Sequence[tuple[Compressor, int, int]], world_size: int) -> None:
        self._compressors = [compressor for compressor, _, _ in parts]
        self._world_size = world_size
        self._slices: list[tuple[int, int, int]] = []
        position = HEADER_NBYTES
        for compressor, rows, numel in parts:
            nbytes = rows * compressor.payload_nbytes(numel, world_size=world_size)
            self._slices.append((position, position + nbytes, rows))
            position += nbytes
        self.nbytes = position

    def encode(
        self,
        matrices: Sequence[torch.Tensor],
        keys: Sequence[Sequence[int]],
        rank: int,
        health: torch.Tensor,
        out: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Return the payload (nbytes,), uint8, of one matrix and its keys per part."""
        payload = (
            torch.empty(self.nbytes, dtype=torch.uint8, device=health.device)
            if out is None
            else out
        )
        payload[:HEADER_NBYTES].view(torch.float32).copy_(health)
        for compressor, (start, stop, _), matrix, part_keys in zip(
            self._compressors, self._slices, matrices, keys, strict=True
        ):
            rows = compressor._compress(matrix, part_keys, rank, self._world_size)
            payload[start:stop].view(rows.dtype).view(rows.shape).copy_(rows)
        return payload

    def decode(
        self,
        matrices: Sequence[torch.Tensor],
        payload: torch.Tensor,
        keys: Sequence[Sequence[int]],
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


def total_health(payloads: torch.Tensor) -> torch.Tensor:
    """Return the summed health, float32, of payloads (N, nbytes) or of one summed payload."""
    return payloads[..., :HEADER_NBYTES].contiguous().view(torch.float32).sum()
