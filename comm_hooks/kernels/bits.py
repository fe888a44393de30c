"""Pack small integers into bytes, least significant bit first, and unpack them."""

import numpy as np
import torch
from torch import Tensor

from comm_hooks.errors import PayloadError


def pack_bits(bits: Tensor) -> Tensor:
    """Pack booleans (..., m), or zeros and ones, into bytes (..., ceil(m / 8)), uint8.

    The last byte is zero-padded.
    """
    if bits.device.type == "cpu":
        return torch.from_numpy(np.packbits(bits.numpy(), axis=-1, bitorder="little"))
    return _pack_whole(bits, 1)


def unpack_bits(octets: Tensor, count: int) -> Tensor:
    """Return the first ``count`` bits of bytes (..., ceil(count / 8)) as uint8 zeros and ones."""
    if octets.device.type == "cpu":
        bits = np.unpackbits(octets.numpy(), axis=-1, count=count, bitorder="little")
        return torch.from_numpy(bits)
    return _unpack_whole(octets, count, 1)


def packed_nbytes(count: int, width: int) -> int:
    """Return the number of bytes that ``count`` codes of ``width`` bits take when packed."""
    return -(-count * width // 8)


def pack_codes(codes: Tensor, width: int) -> Tensor:
    """Pack integers (..., m) below 2**width into bytes (..., ceil(m * width / 8)).

    Codes of 1, 2, 4 and 8 bits are packed whole, others in planes: the lowest bits of all codes,
    then the second ones, and so on, with one operation on whole vectors per bit.

    Args:
        codes: any integer dtype.
        width: 0 to 16 bits; 0 stores no bytes.
    """
    if width == 0:
        return torch.empty(*codes.shape[:-1], 0, dtype=torch.uint8, device=codes.device)
    if width == 1:
        return pack_bits(codes.bool())
    if width == 8:
        return codes.to(torch.uint8)
    if width in (2, 4):
        return _pack_whole(codes, width)
    if width < 8:
        planes = (codes.to(torch.uint8)[..., None, :] >> _places(width, codes.device)) & 1
    else:
        # One after the other: all at once would be 64 times the bits.
        planes = torch.stack([(codes >> place) & 1 for place in range(width)], dim=-2)
    return pack_bits(planes.flatten(-2))


def unpack_codes(octets: Tensor, count: int, width: int) -> Tensor:
    """Return the ``count`` codes in bytes of :func:`pack_codes`: uint8 up to 8 bits, else int64."""
    if width == 0:
        return octets.new_zeros(*octets.shape[:-1], count)
    if width == 1:
        return unpack_bits(octets, count)
    if width == 8:
        return octets[..., :count]
    if width in (2, 4):
        return _unpack_whole(octets, count, width)
    planes = unpack_bits(octets, count * width).unflatten(-1, (width, count))
    if width < 8:
        return (planes << _places(width, octets.device)).sum(-2, dtype=torch.uint8)
    codes = planes.select(-2, 0).long()
    for place in range(1, width):
        codes |= planes.select(-2, place).long() << place
    return codes


def _places(width: int, device: torch.device) -> Tensor:
    """Return the places 0 to width - 1 of the bits of a code, as a column (width, 1)."""
    return torch.arange(width, dtype=torch.uint8, device=device)[:, None]


def _pack_whole(codes: Tensor, width: int) -> Tensor:
    per_byte = 8 // width
    padding = -codes.shape[-1] % per_byte
    grouped = torch.nn.functional.pad(codes.to(torch.uint8), (0, padding))
    grouped = grouped.unflatten(-1, (-1, per_byte))
    if codes.device.type != "cpu":
        places = torch.arange(0, 8, width, dtype=torch.uint8, device=codes.device)
        return (grouped << places).sum(-1, dtype=torch.uint8)
    first, *others = grouped.unbind(-1)
    for place, code in enumerate(others, start=1):
        first = first | (code << (place * width))
    return first


def _unpack_whole(octets: Tensor, count: int, width: int) -> Tensor:
    places = torch.arange(0, 8, width, dtype=torch.uint8, device=octets.device)
    return ((octets[..., None] >> places) & ((1 << width) - 1)).flatten(-2)[..., :count]


def set_places(bits: Tensor, count: int, *, missing: int | None = None) -> Tensor:
    """Return the indices of the bits that are 1 in each set, ascending: int64 (n, sets, count).

    Args:
        bits: zeros and ones (n, sets, m), uint8.
        count: the number of set bits in each set.
        missing: the index that fills up sets with fewer bits; None: every set has ``count``.

    Raises:
        PayloadError: on the CPU, if a set has more than ``count`` bits, or fewer with
            ``missing=None``.
    """
    rows, sets, width = bits.shape
    if bits.device.type == "cpu":
        found = np.flatnonzero(bits.numpy().view(np.bool_))
        starts = np.arange(0, (rows * sets + 1) * width, width)
        edges = np.searchsorted(found, starts)
        counts = np.diff(edges)
        if (counts > count).any() or (missing is None and (counts < count).any()):
            raise PayloadError(
                f"a payload does not have {count} elements in every block: it is damaged, or a "
                "compressor with other settings wrote it"
            )
        if (counts == count).all():
            result = found.reshape(rows * sets, count) - starts[:-1, None]
        else:
            result = np.full((rows * sets, count), missing)
            owners = np.repeat(np.arange(rows * sets), counts)
            result[owners, np.arange(len(found)) - edges[owners]] = found - starts[owners]
        return torch.from_numpy(result).view(rows, sets, count)
    # Without nonzero(), whose size would have to be waited for: unset bits and those of a damaged
    # payload are written to one spare slot behind the others.
    slots = torch.where(bits.bool(), bits.long().cumsum(2) - 1, count).clamp_(max=count)
    places = torch.arange(width, device=bits.device).expand_as(slots)
    filled = torch.full((rows, sets, count + 1), missing or 0, device=bits.device)
    return filled.scatter_(2, slots, places)[..., :count]
