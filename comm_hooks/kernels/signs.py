"""Signs in one bit each, with the mean magnitude of their block, and back."""

from functools import cache

import numpy as np
import numpy.typing as npt
import torch

from comm_hooks.kernels.pieces import PIECE, Pieces, chunks, packed, per_chunk
from comm_hooks.kernels.residual import Residual
from comm_hooks.kernels.triton import LARGEST_BLOCK, available
from comm_hooks.wire.bits import pack_bits, packed_nbytes, unpack_bits


def encode_signs(
    rows: torch.Tensor,
    size: int,
    *,
    residual: Residual | None = None,
    subtract: bool = False,
    scales: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the mean magnitude of every block and the sign of every element.

    Args:
        rows: (n, numel), float32.
        size: the elements of a block; the last block of a row may be shorter.
        residual: added to ``rows``, in place, first.
        subtract: subtract from ``rows``, in place, what :func:`decode_signs` makes of the result.
        scales: take the place of the mean magnitudes, in their shape, and are returned.

    Returns:
        ``(scales, octets)``: float32 (n, ceil(numel / size)), and uint8 (n, ceil(numel / 8)), in
        which a bit is 1 where ``x >= 0``, for zeros of either sign too.  The bits behind a row's
        last element are 0.

    Example::

        >>> encode_signs(torch.tensor([[1.0, -3.0, 0.0]]), 2)
        (tensor([[2., 0.]]), tensor([[5]], dtype=torch.uint8))
    """
    if available(rows) and rows.is_contiguous() and size <= LARGEST_BLOCK and size % 8 == 0:
        from comm_hooks.kernels.triton import signs as on_gpu

        return on_gpu.encode_signs(rows, size, residual=residual, subtract=subtract, scales=scales)
    if rows.device.type == "cpu":
        return _encode_in_pieces(rows, size, residual, subtract, scales)
    return reference_encode_signs(rows, size, residual=residual, subtract=subtract, scales=scales)


def decode_signs(
    out: torch.Tensor,
    scales: torch.Tensor,
    octets: torch.Tensor,
    size: int,
    *,
    alpha: float,
    add: bool,
) -> None:
    """Write ``alpha * scale * sign`` of every element to ``out``, or ``add`` it.

    Args:
        out: (n, numel), float32.
        scales, octets, size: as :func:`encode_signs` has them; more octets may follow.

    Example::

        >>> out = torch.empty(1, 3)
        >>> scales, octets = torch.tensor([[2.0, 1.0]]), torch.tensor([[5]], dtype=torch.uint8)
        >>> decode_signs(out, scales, octets, 2, alpha=0.5, add=False)
        >>> out
        tensor([[ 1.0000, -1.0000,  0.5000]])
    """
    if available(out) and out.is_contiguous():
        from comm_hooks.kernels.triton import signs as on_gpu

        on_gpu.decode_signs(out, scales, octets, size, alpha=alpha, add=add)
        return
    if out.device.type == "cpu":
        _decode_in_pieces(out, scales, octets, size, alpha, add)
        return
    reference_decode_signs(out, scales, octets, size, alpha=alpha, add=add)


def decode_sum_of_signs(
    out: torch.Tensor, scales: torch.Tensor, octets: torch.Tensor, size: int, *, alpha: float
) -> None:
    """Write ``alpha`` times the sum of what N ranks' signs stand for to ``out``, in rank order.

    Args:
        out: (n, numel), float32.
        scales, octets: as :func:`decode_signs` takes them, for each rank: (N, n, ...).
    """
    if available(out) and out.is_contiguous():
        from comm_hooks.kernels.triton import signs as on_gpu

        on_gpu.decode_sum_of_signs(out, scales, octets, size, alpha=alpha)
        return
    at_once = PIECE // out.numel()
    if out.device.type == "cpu" and at_once >= 8:  # else the calls do not count
        out.zero_()
        for first in range(0, len(octets), at_once):
            group = slice(first, first + at_once)
            vectors = torch.empty(len(octets[group]), *out.shape)
            rows, row_scales, row_octets = (
                part.flatten(0, 1) for part in (vectors, scales[group], octets[group])
            )
            decode_signs(rows, row_scales, row_octets, size, alpha=alpha, add=False)
            for vector in vectors:
                out.add_(vector)
        return
    for rank, (rank_scales, rank_octets) in enumerate(zip(scales, octets, strict=True)):
        decode_signs(out, rank_scales, rank_octets, size, alpha=alpha, add=rank > 0)


def reference_encode_signs(
    rows: torch.Tensor,
    size: int,
    *,
    residual: Residual | None = None,
    subtract: bool = False,
    scales: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Do the same as :func:`encode_signs` in the plainest way."""
    if residual:
        residual.add_to(rows)
    if scales is None:
        scales = mean_magnitudes(rows, size, power=1)
    octets = pack_bits(rows >= 0)
    if subtract:
        reference_decode_signs(rows, scales, octets, size, alpha=-1.0, add=True)
    return scales, octets


def mean_magnitudes(rows: torch.Tensor, size: int, *, power: int) -> torch.Tensor:
    """Return every block's mean magnitude, or root mean square, (n, ceil(numel / size)).

    Args:
        rows: (n, numel), float32.
        size: the elements of a block; the last block of a row may be shorter.
        power: 1 for the mean magnitude, 2 for the root mean square.

    Example::

        >>> mean_magnitudes(torch.tensor([[1.0, -7.0, 0.0]]), 2, power=2)
        tensor([[5., 0.]])
    """
    padding = -rows.shape[1] % size
    padded = torch.nn.functional.pad(rows, (0, padding)) if padding else rows
    norms = torch.linalg.vector_norm(padded.unflatten(1, (-1, size)), power, dim=2)
    # The last block's padding takes no part in its mean.
    numels = torch.full((norms.shape[1],), float(size), device=rows.device)
    numels[-1] -= padding
    return norms / numels ** (1 / power)


def reference_decode_signs(
    out: torch.Tensor,
    scales: torch.Tensor,
    octets: torch.Tensor,
    size: int,
    *,
    alpha: float,
    add: bool,
) -> None:
    """Do the same as :func:`decode_signs` in the plainest way."""
    numel = out.shape[1]
    signs = 2 * unpack_bits(octets[:, : packed_nbytes(numel, 1)], numel).float() - 1
    values = (scales * alpha).repeat_interleave(size, dim=1)[:, :numel] * signs
    out.copy_(out + values if add else values)


def _encode_in_pieces(
    rows: torch.Tensor,
    size: int,
    residual: Residual | None,
    subtract: bool,
    given: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    n, numel = rows.shape
    rows = rows.detach()
    scales = torch.empty(n, -(-numel // size)) if given is None else given
    octets = np.empty((n, packed_nbytes(numel, 1)), np.uint8)
    pieces = Pieces(n, numel, size)
    is_positive = np.empty(pieces.numel, np.bool_)
    for top, columns, blocks in pieces:
        piece, piece_scales = rows[top, columns], scales[top, blocks]
        width = piece.shape[1]
        if residual:
            residual.of(top, columns).add_to(piece)
        if given is None:
            magnitudes = torch.abs(piece, out=pieces.buffer(*piece.shape))
            for chunk, sums in zip(
                chunks(magnitudes, size), per_chunk(piece_scales, width, size), strict=True
            ):
                torch.sum(chunk, dim=2, out=sums).div_(chunk.shape[2])
        bits = is_positive[: piece.numel()].reshape(piece.shape)
        np.greater_equal(piece.numpy(), 0, out=bits)
        octets[top, packed(columns, 1)] = np.packbits(bits, axis=1, bitorder="little")
        if subtract:
            signs = _signs(octets[top, packed(columns, 1)], pieces)[:, :width]
            for chunk, means in zip(
                chunks(signs, size), per_chunk(piece_scales, width, size), strict=True
            ):
                chunk.mul_(means[..., None])
            piece.sub_(signs)
    return scales, torch.from_numpy(octets)


def _decode_in_pieces(
    out: torch.Tensor,
    scales: torch.Tensor,
    octets: torch.Tensor,
    size: int,
    alpha: float,
    add: bool,
) -> None:
    n, numel = out.shape
    scales, packed_signs = scales * alpha, octets.numpy()
    pieces = Pieces(n, numel, size)
    for top, columns, blocks in pieces:
        piece = out[top, columns]
        width = piece.shape[1]
        signs = _signs(packed_signs[top, packed(columns, 1)], pieces)[:, :width]
        for chunk, scale, target in zip(
            chunks(signs, size),
            per_chunk(scales[top, blocks], width, size),
            chunks(signs if add else piece, size),
            strict=True,
        ):
            torch.mul(chunk, scale[..., None], out=target)
        if add:
            piece.add_(signs)


def _signs(octets: npt.NDArray[np.uint8], pieces: Pieces) -> torch.Tensor:
    """Return the signs (n, 8 m), +1 and -1, of octets (n, m), in the buffer of the pieces."""
    height, width = octets.shape
    signs = pieces.buffer(height, 8 * width)
    bytewise = signs.numpy().reshape(height, width, 8)
    # With mode="raise", numpy would write to a copy of the output first.
    np.take(_table(), octets, axis=0, out=bytewise, mode="clip")
    return signs


@cache
def _table() -> npt.NDArray[np.float32]:
    """Return the eight signs that each octet stands for, (256, 8)."""
    bits = np.unpackbits(np.arange(256, dtype=np.uint8)[:, None], axis=1, bitorder="little")
    return 2 * bits.astype(np.float32) - 1
