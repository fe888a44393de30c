"""Elias-Fano: k sorted integers below n in k (2 + log2(n / k)) bits, always the same number.

Elias, J. ACM 1974; Fano, 1971.  An integer's low bits are stored as they are; its high bits are
stored in a bitmap in which the i-th set bit stands at place ``high_i + i``.  At 64 of 4096 this
takes 8 bits an index where a plain code takes 12 and the entropy is 7.36; unlike entropy codes its
size does not depend on the data, so ranks need not negotiate it.
"""

from dataclasses import dataclass

import torch

from comm_hooks.wire.bits import pack_bits, pack_codes, packed_nbytes, unpack_bits, unpack_codes


@dataclass(frozen=True)
class EliasFano:
    """The code for ``count`` ascending distinct integers in ``range(universe)``.

    Example::

        >>> code = EliasFano(universe=4096, count=64)
        >>> code.nbytes(sets=1)
        64
    """

    universe: int
    count: int

    @property
    def low_bits(self) -> int:
        return max(0, (self.universe // self.count).bit_length() - 1)

    @property
    def bitmap_bits(self) -> int:
        return self.count + ((self.universe - 1) >> self.low_bits)

    def nbytes(self, sets: int) -> int:
        """Return the bytes that ``sets`` coded sets take together."""
        lows = packed_nbytes(sets * self.count, self.low_bits)
        return lows + packed_nbytes(sets, self.bitmap_bits)

    def encode(self, indices: torch.Tensor) -> torch.Tensor:
        """Encode ascending indices (n, sets, count), int64, into bytes (n, nbytes(sets))."""
        rows, sets, count = indices.shape
        lows = (indices & ((1 << self.low_bits) - 1)).reshape(rows, sets * count)
        places = (indices >> self.low_bits) + torch.arange(count, device=indices.device)
        bitmap = torch.zeros(
            rows, sets, self.bitmap_bits, dtype=torch.bool, device=indices.device
        ).scatter_(2, places, True)
        return torch.cat([pack_bits(bitmap.flatten(1)), pack_codes(lows, self.low_bits)], dim=1)

    def decode(self, octets: torch.Tensor, sets: int) -> torch.Tensor:
        """Return the indices (n, sets, count), int64, of bytes (n, nbytes(sets))."""
        rows = octets.shape[0]
        split = packed_nbytes(sets, self.bitmap_bits)
        bitmap = unpack_bits(octets[:, :split], sets * self.bitmap_bits)
        bitmap = bitmap.reshape(rows, sets, self.bitmap_bits)
        # The place of the i-th set bit, without nonzero(), whose size would have to be waited for
        # on an accelerator: unset bits are written to one spare slot behind the others.
        slots = torch.where(bitmap.bool(), bitmap.long().cumsum(2) - 1, self.count)
        places = torch.arange(self.bitmap_bits, device=octets.device).expand_as(slots)
        highs = torch.empty(rows, sets, self.count + 1, dtype=torch.int64, device=octets.device)
        highs = highs.scatter_(2, slots, places)[..., : self.count]
        highs = highs - torch.arange(self.count, device=octets.device)
        lows = unpack_codes(octets[:, split:], sets * self.count, self.low_bits)
        return (highs << self.low_bits) | lows.reshape(rows, sets, self.count).long()
