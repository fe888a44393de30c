"""Quantize elements to a few bits between their block's minimum and maximum, and decode them."""

import torch
from torch import Tensor

from comm_hooks.kernels.bits import pack_codes, packed_nbytes, unpack_codes
from comm_hooks.kernels.operators import operator
from comm_hooks.kernels.pieces import Pieces, in_blocks, packed
from comm_hooks.randomness import Keys


@operator()
def encode_min_max(
    rows: Tensor, size: int, bits: int, seeds: Keys | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the range of every block, and the code of every element within that range.

    1. low = min(x), unit = (max(x) - low) / (2^bits - 1) of every block;
    2. code = floor((x - low) / unit + xi), where xi is 1/2, or with ``seeds`` uniform in [0, 1).

    Args:
        rows: (n, numel), float32.
        size: the number of elements of a block; the last block of a row may be shorter.
        bits: 1, 2, 4 or 8.
        seeds: seeds of ``torch.Generator``, one for each row; None: round to the nearest.

    Returns:
        ``(low, unit, octets)``: float32 (n, ceil(numel / size)) twice, and the packed codes, uint8
        (n, ceil(numel * bits / 8)).
    """
    numel = rows.shape[1]
    # Padding repeats the last element, which changes no extreme.
    padded = torch.nn.functional.pad(rows, (0, -numel % size), mode="replicate")
    vectors = padded.unflatten(1, (-1, size))
    low, high = vectors.amin(dim=2), vectors.amax(dim=2)
    unit = (high - low) / (2**bits - 1)
    # Where all elements of a block are equal any code decodes to them.
    levels = (vectors - low[..., None]) / torch.where(unit > 0, unit, 1.0)[..., None]
    levels = levels.flatten(1)[:, :numel]
    for row, generator in zip(levels, _generators(seeds, rows.device), strict=False):
        row += torch.rand(numel, device=rows.device, generator=generator, dtype=torch.float32)
    if seeds is None:
        levels = levels + 0.5
    codes = levels.clamp(0, 2**bits - 1).to(torch.uint8)
    return low, unit, pack_codes(codes, bits)


@operator()
def decode_min_max(
    out: Tensor,
    low: Tensor,
    unit: Tensor,
    octets: Tensor,
    size: int,
    bits: int,
    *,
    alpha: float,
    add: bool,
) -> None:
    """Write ``alpha * (low + code * unit)`` of every element to ``out``, or add it.

    Args:
        out: (n, numel), float32.
        low, unit, octets: the result of :func:`encode_min_max`; more octets may follow.
        size, bits: as for :func:`encode_min_max`.
        alpha, add: a factor of the values, and whether to add them to ``out``.
    """
    numel = out.shape[1]
    codes = unpack_codes(octets[:, : packed_nbytes(numel, bits)], numel, bits).float()
    low, unit = ((alpha * value).repeat_interleave(size, dim=1)[:, :numel] for value in (low, unit))
    values = codes * unit + low
    out.copy_(out + values if add else values)


def _generators(seeds: Keys | None, device: torch.device) -> list[torch.Generator]:
    if seeds is None:
        return []
    return [torch.Generator(device).manual_seed(int(seed)) for seed in seeds]


@encode_min_max.fast()
def _encode_in_pieces(
    rows: Tensor, size: int, bits: int, seeds: Keys | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    n, numel = rows.shape
    rows = rows.detach()
    low, unit = torch.empty(2, n, -(-numel // size), dtype=torch.float32)
    octets = torch.empty(n, packed_nbytes(numel, bits), dtype=torch.uint8)
    generators = _generators(seeds, rows.device)
    pieces = Pieces(n, numel, size)
    for top, columns, blocks in pieces:
        piece = rows[top, columns]
        levels = pieces.buffer(*piece.shape)
        extremes = low[top, blocks], unit[top, blocks]
        for block, target, lowest, step in in_blocks(size, (piece, levels), extremes):
            # Apart they take a seventh of the time of aminmax().
            torch.amin(block, dim=2, keepdim=True, out=lowest)
            torch.amax(block, dim=2, keepdim=True, out=step)
            step.sub_(lowest).div_(2**bits - 1)
            torch.sub(block, lowest, out=target).div_(torch.where(step > 0, step, 1.0))
        for row, generator in zip(levels, generators[top], strict=False):
            row += torch.rand(len(row), generator=generator, dtype=torch.float32)
        if not generators:
            levels += 0.5
        codes = levels.clamp_(0, 2**bits - 1).to(torch.uint8)
        octets[top, packed(columns, bits)] = pack_codes(codes, bits)
    return low, unit, octets


@decode_min_max.fast()
def _decode_in_pieces(
    out: Tensor,
    low: Tensor,
    unit: Tensor,
    octets: Tensor,
    size: int,
    bits: int,
    *,
    alpha: float,
    add: bool,
) -> None:
    low, unit = low * alpha, unit * alpha
    pieces = Pieces(len(out), out.shape[1], size)
    for top, columns, blocks in pieces:
        piece = out[top, columns]
        values = pieces.buffer(*piece.shape)
        values.copy_(unpack_codes(octets[top, packed(columns, bits)], piece.shape[1], bits))
        matrices = values, values if add else piece
        ranges = low[top, blocks], unit[top, blocks]
        for codes, target, lowest, step in in_blocks(size, matrices, ranges):
            torch.mul(codes, step, out=target).add_(lowest)
        if add:
            piece.add_(values)
