"""A checksum of 64 bits for strings of bytes, on any device.

A string is read as signed 64-bit words x_j, little-endian, with h_j the upper half of each, and
becomes

    sum_j (c_j x_j + d_j h_j)  modulo 2^64,

where c and d are pseudo-random odd numbers.  Any two strings of one length that differ anywhere
have the same upper 32 bits with a probability of 2^-32 over c and d, whatever the difference is.
The second term is for top bits alone: 2^63 times an odd number is always 2^63, so without it two
flipped signs would cancel.  It costs two passes of plain integer arithmetic, on any device.
"""

import functools
from collections.abc import Sequence

import torch
from torch import Tensor

from comm_hooks.randomness import random_bits

# Weights are drawn for pieces of this many words, and for as many pieces.
_PIECE = 1 << 13
_AT_ONCE = 16


def checksums(words: Tensor) -> Tensor:
    """Return the checksum, (n,), int64, of each row of words (n, count), int64."""
    count = words.shape[1]
    if count > _PIECE:
        full = count // _PIECE
        pieces = words[:, : full * _PIECE].reshape(-1, _PIECE)
        # A few at a time: upper halves then stay in the cache.
        parts = [torch.cat([checksums(some) for some in pieces.split(_AT_ONCE)]).view(-1, full)]
        if count % _PIECE:
            parts.append(checksums(words[:, full * _PIECE :])[:, None])
        # As many numbers as there were pieces: at most a few for anything that fits in memory.
        return checksums(torch.cat(parts, dim=1))
    low, high = (table[:count] for table in _weights(words.device))
    if words.device.type == "cpu":
        return torch.mv(words, low) + torch.mv(words >> 32, high)
    return torch.addcmul(words * low, words >> 32, high).sum(1)


def fingerprint(tensors: Sequence[Tensor]) -> Tensor:
    """Return a fingerprint of 32 bits that depends on all elements of tensors and their order.

    Elements count in the order of their indices, in any memory layout.

    Args:
        tensors: the tensors, of any dtypes and layouts, sparse ones as well, on one device.

    Returns:
        An int32 scalar on that device, without waiting for an accelerator.
    """
    if not tensors:
        return torch.zeros((), dtype=torch.int32)
    sums = torch.cat([checksums(_words(part)[None]) for each in tensors for part in _parts(each)])
    return upper_half(checksums(sums[None])[0])


def upper_half(checksum: Tensor) -> Tensor:
    """Return the upper 32 bits of checksums, which depend on all input bits, as int32."""
    return (checksum >> 32).int()


def signed(word: int) -> int:
    """Return the number in [-2^31, 2^31) with the same 32 bits as a number in [0, 2^32)."""
    return word - (1 << 32) if word >> 31 else word


def _parts(tensor: Tensor) -> list[Tensor]:
    if tensor.layout is torch.strided:
        return [tensor]
    sparse = tensor.detach().to_sparse()
    return [sparse._indices(), sparse._values()]


def _words(tensor: Tensor) -> Tensor:
    """Return a tensor's bytes as 1-D int64 words, padded with zeros at the end."""
    octets = tensor.detach().contiguous().flatten().view(torch.uint8)
    missing = -octets.numel() % 8
    if missing or octets.storage_offset() % 8:
        octets = torch.nn.functional.pad(octets, (0, missing))
    # Padding by nothing copies nothing.
    return (octets.clone() if octets.storage_offset() % 8 else octets).view(torch.int64)


@functools.lru_cache(maxsize=8)
def _weights(device: torch.device) -> tuple[Tensor, Tensor]:
    bits = random_bits([1, 2], _PIECE) | 1
    low, high = torch.from_numpy(bits.view("int64")).to(device)
    return low, high
