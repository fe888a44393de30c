"""Sections of a payload, aligned to 4 bytes, so that float32 can be viewed in place."""

import torch
from torch import Tensor


def word_aligned(nbytes: int) -> int:
    """Return a number of bytes, rounded up to a multiple of 4."""
    return -(-nbytes // 4) * 4


def join(*sections: Tensor) -> Tensor:
    """Join sections (n, ...), each padded with zeros to 4 bytes, into payloads (n, nbytes), uint8.

    A single section that needs no padding is not copied.
    """
    parts = []
    for section in sections:
        octets = section.view(torch.uint8)
        parts.append(octets)
        if missing := -octets.shape[1] % 4:
            parts.append(octets.new_zeros(len(octets), missing))
    return torch.cat(parts, dim=1) if len(parts) > 1 else parts[0].contiguous()
