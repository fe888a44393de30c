"""Elias-Fano: k sorted integers below n in k (2 + log2(n / k)) bits, always the same number.

Elias, J. ACM 1974; Fano, 1971.  An integer's low bits are stored as they are; its high bits are
stored in a bitmap in which the i-th set bit stands at place ``high_i + i``.  At 64 of 4096 this
takes 8 bits an index where a plain code takes 12 and the entropy is 7.36; unlike entropy codes its
size does not depend on the data, whatever the data.
"""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from comm_hooks.kernels.bits import (
    pack_bits,
    pack_codes,
    packed_nbytes,
    set_places,
    unpack_bits,
    unpack_codes,
)
from comm_hooks.wire.places import PlacesCode


@dataclass(frozen=True)
class EliasFano(PlacesCode):
    """The code for ``count`` ascending distinct integers in ``range(universe)``, at least one.

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
        lows = packed_nbytes(sets * self.count, self.low_bits)
        return lows + packed_nbytes(sets, self.bitmap_bits)

    def encode(
        self, indices: torch.Tensor, first: npt.NDArray[np.int64]
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        rows, sets, count = indices.shape
        lows = (indices & ((1 << self.low_bits) - 1)).reshape(rows, sets * count)
        places = (indices >> self.low_bits) + torch.arange(count, device=indices.device)
        bitmap = torch.zeros(
            rows, sets, self.bitmap_bits, dtype=torch.bool, device=indices.device
        ).scatter_(2, places, True)
        octets = [pack_bits(bitmap.flatten(1)), pack_codes(lows, self.low_bits)]
        return torch.cat(octets, dim=1), None

    def decode(
        self, octets: torch.Tensor, sets: int, first: npt.NDArray[np.int64]
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        rows = octets.shape[0]
        split = packed_nbytes(sets, self.bitmap_bits)
        bits = unpack_bits(octets[:, :split], sets * self.bitmap_bits)
        places = set_places(bits.view(rows, sets, self.bitmap_bits), self.count)
        highs = places - torch.arange(self.count, device=octets.device)
        lows = unpack_codes(octets[:, split:], sets * self.count, self.low_bits)
        found = (highs << self.low_bits) | lows.view(rows, sets, self.count).long()
        # Bytes that are no code may have too few high bits, or low ones from behind the end.
        return found.clamp_(0, self.universe - 1), None
