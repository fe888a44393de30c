"""Encode elements as sign bits and the mean magnitude of their block, and decode them."""

from functools import cache

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from comm_hooks.kernels.bits import pack_bits, packed_nbytes, unpack_bits
from comm_hooks.kernels.operators import if_contiguous, operator
from comm_hooks.kernels.pieces import PIECE, Pieces, cut, in_blocks, packed
from comm_hooks.kernels.residual import Residual
from comm_hooks.kernels.triton import LARGEST_BLOCK


def _fits(rows: Tensor, size: int, **_: object) -> bool:
    return rows.is_contiguous() and size <= LARGEST_BLOCK and size % 8 == 0


@operator(triton=_fits)
def encode_signs(
    rows: Tensor,
    size: int,
    *,
    residual: Residual | None = None,
    subtract: bool = False,
    scales: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Return the mean magnitude of every block and the sign of every element.

    Args:
        rows: (n, numel), float32.
        size: the number of elements of a block; the last block of a row may be shorter.
        residual: the residual to be added to ``rows`` first, in place; None: nothing is added.
        subtract: whether to subtract the decoded result from ``rows``, in place.
        scales: used and returned instead of the mean magnitudes, in their shape.

    Returns:
        ``(scales, octets)``: float32 (n, ceil(numel / size)), and uint8 (n, ceil(numel / 8)) with
        a bit of 1 where ``x >= 0``, also for negative zeros.  Bits behind the last element are 0.
    """
    if residual:
        residual.add_to(rows)
    if scales is None:
        scales = mean_magnitudes(rows, size, power=1)
    octets = pack_bits(rows >= 0)
    if subtract:
        decode_signs.reference(rows, scales[None], octets[None], size, alpha=-1.0, add=True)
    return scales, octets


@operator(triton=if_contiguous)
def decode_signs(
    out: Tensor, scales: Tensor, octets: Tensor, size: int, *, alpha: float, add: bool
) -> None:
    """Write ``alpha`` times the sum of the decoded signs of N ranks to ``out``, or add it.

    The sum is in rank order: all ranks round alike.

    Args:
        out: (n, numel), float32.
        scales, octets: from :func:`encode_signs`, per rank: (N, n, ...); more octets may follow.
        size: the number of elements of a block.
        alpha, add: a factor of the values, and whether to add them to ``out``.
    """
    numel = out.shape[1]
    for rank, rank_octets in enumerate(octets):
        signs = 2 * unpack_bits(rank_octets[:, : packed_nbytes(numel, 1)], numel).float() - 1
        values = (scales[rank] * alpha).repeat_interleave(size, dim=1)[:, :numel] * signs
        out.copy_(out + values if add or rank else values)


def mean_magnitudes(rows: Tensor, size: int, *, power: int) -> Tensor:
    """Return every block's mean magnitude, or root mean square, (n, ceil(numel / size)).

    Args:
        rows: (n, numel), float32.
        size: the number of elements of a block; the last block of a row may be shorter.
        power: 1 for the mean magnitude, 2 for the root mean square.
    """
    blocks = cut(rows, size)
    norms = torch.linalg.vector_norm(blocks, power, dim=2)
    # Squares of float32 overflow above 1.8e19 and are 0 below 1e-23.
    if power == 2 and (rows.device.type != "cpu" or not (norms.isfinite() & (norms > 0)).all()):
        norms = torch.linalg.vector_norm(blocks, power, dim=2, dtype=torch.float64).float()
    # The last block's padding takes no part in its mean.
    numels = torch.full((norms.shape[1],), float(size), device=rows.device, dtype=torch.float32)
    numels[-1] -= -rows.shape[1] % size
    return norms / numels ** (1 / power)


@encode_signs.fast()
def _encode_in_pieces(
    rows: Tensor,
    size: int,
    *,
    residual: Residual | None = None,
    subtract: bool = False,
    scales: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    n, numel = rows.shape
    rows = rows.detach()
    means = torch.empty(n, -(-numel // size), dtype=torch.float32) if scales is None else scales
    octets = np.empty((n, packed_nbytes(numel, 1)), np.uint8)
    pieces = Pieces(n, numel, size)
    is_positive = np.empty(pieces.numel, np.bool_)
    for top, columns, blocks in pieces:
        piece, piece_means = rows[top, columns], means[top, blocks]
        if residual:
            residual.of(top, columns).add_to(piece)
        if scales is None:
            magnitudes = torch.abs(piece, out=pieces.buffer(*piece.shape))
            for block, sums in in_blocks(size, (magnitudes,), (piece_means,)):
                torch.sum(block, dim=2, keepdim=True, out=sums).div_(block.shape[2])
        bits = is_positive[: piece.numel()].reshape(piece.shape)
        np.greater_equal(piece.numpy(), 0, out=bits)
        octets[top, packed(columns, 1)] = np.packbits(bits, axis=1, bitorder="little")
        if subtract:
            signs = _signs(octets[top, packed(columns, 1)], pieces)[:, : piece.shape[1]]
            for block, mean in in_blocks(size, (signs,), (piece_means,)):
                block.mul_(mean)
            piece.sub_(signs)
    return means, torch.from_numpy(octets)


@decode_signs.fast()
def _decode_in_pieces(
    out: Tensor, scales: Tensor, octets: Tensor, size: int, *, alpha: float, add: bool
) -> None:
    at_once = PIECE // out.numel()
    if len(octets) == 1 or at_once < 8:  # the calls do not count
        for rank, rank_octets in enumerate(octets):
            _decode_rows(out, scales[rank] * alpha, rank_octets, size, add=add or rank > 0)
        return
    if not add:
        out.zero_()
    for some_scales, some_octets in zip(scales.split(at_once), octets.split(at_once), strict=True):
        vectors = torch.empty(len(some_octets), *out.shape, dtype=torch.float32)
        rows, row_scales, row_octets = (
            part.flatten(0, 1) for part in (vectors, some_scales, some_octets)
        )
        _decode_rows(rows, row_scales * alpha, row_octets, size, add=False)
        for vector in vectors:
            out.add_(vector)


def _decode_rows(out: Tensor, scales: Tensor, octets: Tensor, size: int, *, add: bool) -> None:
    """Write the decoded rows of octets (n, ...) to ``out`` (n, numel), or add them."""
    packed_signs = octets.numpy()
    pieces = Pieces(len(out), out.shape[1], size)
    for top, columns, blocks in pieces:
        piece = out[top, columns]
        signs = _signs(packed_signs[top, packed(columns, 1)], pieces)[:, : piece.shape[1]]
        matrices = signs, signs if add else piece
        for block, target, scale in in_blocks(size, matrices, (scales[top, blocks],)):
            torch.mul(block, scale, out=target)
        if add:
            piece.add_(signs)


def _signs(octets: npt.NDArray[np.uint8], pieces: Pieces) -> Tensor:
    """Return the signs (n, 8 m), +1 and -1, of octets (n, m), in the buffer of the pieces."""
    height, width = octets.shape
    signs = pieces.buffer(height, 8 * width)
    bytewise = signs.numpy().reshape(height, width, 8)
    # With mode="raise", numpy would write to a copy of the output first.
    np.take(_table(), octets, axis=0, out=bytewise, mode="clip")
    return signs


@cache
def _table() -> npt.NDArray[np.float32]:
    """Return a table of the eight signs, +1 and -1, of each byte value, (256, 8)."""
    bits = np.unpackbits(np.arange(256, dtype=np.uint8)[:, None], axis=1, bitorder="little")
    return 2 * bits.astype(np.float32) - 1
