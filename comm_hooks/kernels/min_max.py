"""Codes of a few bits between the minimum and the maximum of their block, and back."""

import torch

from comm_hooks.kernels.pieces import Pieces, chunks, packed, per_chunk
from comm_hooks.randomness import Keys
from comm_hooks.wire.bits import pack_codes, packed_nbytes, unpack_codes


def encode_min_max(
    rows: torch.Tensor, size: int, bits: int, seeds: Keys | None = None
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return the range of every block and the code of every element within it.

    1. low = min(x), unit = (max(x) - low) / (2^bits - 1) of every block;
    2. code = floor((x - low) / unit + xi), where xi is 1/2, or with ``seeds`` uniform in [0, 1).

    Args:
        rows: (n, numel), float32.
        size: the elements of a block; the last block of a row may be shorter.
        bits: 1, 2, 4 or 8.
        seeds: one for each row, for ``torch.Generator``; None: round to the nearest.

    Returns:
        ``(low, unit, octets)``: float32 (n, ceil(numel / size)) twice, and the packed codes, uint8
        (n, ceil(numel * bits / 8)).

    Example::

        >>> encode_min_max(torch.tensor([[0.0, 3.0, 7.0, 15.0]]), 4, 4)
        (tensor([[0.]]), tensor([[1.]]), tensor([[ 48, 247]], dtype=torch.uint8))
    """
    if rows.device.type == "cpu":
        return _encode_in_pieces(rows, size, bits, seeds)
    return reference_encode_min_max(rows, size, bits, seeds)


def decode_min_max(
    out: torch.Tensor,
    low: torch.Tensor,
    unit: torch.Tensor,
    octets: torch.Tensor,
    size: int,
    bits: int,
    *,
    alpha: float,
    add: bool,
) -> None:
    """Write ``alpha * (low + code * unit)`` of every element to ``out``, or ``add`` it.

    Args:
        out: (n, numel), float32.
        low, unit, octets, size, bits: as :func:`encode_min_max` has them; more octets may follow.
    """
    if out.device.type == "cpu":
        _decode_in_pieces(out, low * alpha, unit * alpha, octets, size, bits, add)
        return
    reference_decode_min_max(out, low, unit, octets, size, bits, alpha=alpha, add=add)


def reference_encode_min_max(
    rows: torch.Tensor, size: int, bits: int, seeds: Keys | None = None
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Do the same as :func:`encode_min_max` in the plainest way."""
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
        row += torch.rand(numel, device=rows.device, generator=generator)
    if seeds is None:
        levels = levels + 0.5
    codes = levels.clamp(0, 2**bits - 1).to(torch.uint8)
    return low, unit, pack_codes(codes, bits)


def reference_decode_min_max(
    out: torch.Tensor,
    low: torch.Tensor,
    unit: torch.Tensor,
    octets: torch.Tensor,
    size: int,
    bits: int,
    *,
    alpha: float,
    add: bool,
) -> None:
    """Do the same as :func:`decode_min_max` in the plainest way."""
    numel = out.shape[1]
    codes = unpack_codes(octets[:, : packed_nbytes(numel, bits)], numel, bits).float()
    low, unit = ((alpha * value).repeat_interleave(size, dim=1)[:, :numel] for value in (low, unit))
    values = codes * unit + low
    out.copy_(out + values if add else values)


def _generators(seeds: Keys | None, device: torch.device) -> list[torch.Generator]:
    if seeds is None:
        return []
    return [torch.Generator(device).manual_seed(int(seed)) for seed in seeds]


def _encode_in_pieces(
    rows: torch.Tensor, size: int, bits: int, seeds: Keys | None
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    n, numel = rows.shape
    rows = rows.detach()
    low, unit = torch.empty(2, n, -(-numel // size))
    octets = torch.empty(n, packed_nbytes(numel, bits), dtype=torch.uint8)
    generators = _generators(seeds, rows.device)
    pieces = Pieces(n, numel, size)
    for top, columns, blocks in pieces:
        piece = rows[top, columns]
        width = piece.shape[1]
        levels = pieces.buffer(*piece.shape)
        for chunk, target, lowest, step in zip(
            chunks(piece, size),
            chunks(levels, size),
            per_chunk(low[top, blocks], width, size),
            per_chunk(unit[top, blocks], width, size),
            strict=True,
        ):
            # Apart they take a seventh of the time of aminmax().
            torch.amin(chunk, dim=2, out=lowest)
            torch.amax(chunk, dim=2, out=step)
            step.sub_(lowest).div_(2**bits - 1)
            divisor = torch.where(step > 0, step, 1.0)[..., None]
            torch.sub(chunk, lowest[..., None], out=target).div_(divisor)
        for row, generator in zip(levels, generators[top], strict=False):
            row += torch.rand(width, generator=generator)
        if not generators:
            levels += 0.5
        codes = levels.clamp_(0, 2**bits - 1).to(torch.uint8)
        octets[top, packed(columns, bits)] = pack_codes(codes, bits)
    return low, unit, octets


def _decode_in_pieces(
    out: torch.Tensor,
    low: torch.Tensor,
    unit: torch.Tensor,
    octets: torch.Tensor,
    size: int,
    bits: int,
    add: bool,
) -> None:
    n, numel = out.shape
    pieces = Pieces(n, numel, size)
    for top, columns, blocks in pieces:
        piece = out[top, columns]
        width = piece.shape[1]
        values = pieces.buffer(*piece.shape)
        values.copy_(unpack_codes(octets[top, packed(columns, bits)], width, bits))
        for chunk, lowest, step, target in zip(
            chunks(values, size),
            per_chunk(low[top, blocks], width, size),
            per_chunk(unit[top, blocks], width, size),
            chunks(values if add else piece, size),
            strict=True,
        ):
            torch.mul(chunk, step[..., None], out=target).add_(lowest[..., None])
        if add:
            piece.add_(values)
