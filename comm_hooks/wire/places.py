"""Codes for the kept places of a block: the interface, and two codes with room for any places.

Elias-Fano (Elias, J. ACM 1974; Fano, 1971) takes k (2 + log2(n / k)) bits for k sorted integers
below n, always the same number: an integer's low bits are stored as they are, and its high bits in
a bitmap in which the i-th set bit stands at place ``high_i + i``.  At 64 of 4096 this takes 8 bits
an index where a plain code takes 12 and the entropy is 7.36; unlike the size of entropy codes its
size does not depend on the data.  Where about half of the places are kept a plain bitmap, one bit
for each place, is the best code.
"""

from abc import ABC, abstractmethod
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from comm_hooks.kernels.bits import (
    pack_bits,
    pack_codes,
    packed_nbytes,
    set_places,
    unpack_bits,
    unpack_codes,
)


@dataclass(frozen=True)
class PlacesCode(ABC):
    """A code for sets of ``count`` ascending distinct integers in ``range(universe)``.

    The bytes of several sets are a stream of bits for all sets, then the ``low_bits`` lowest bits
    of each index as they are.  The size depends on the number of sets alone, so all ranks know it.
    """

    universe: int
    count: int

    @property
    @abstractmethod
    def low_bits(self) -> int: ...

    @abstractmethod
    def stream_bits(self, sets: int) -> int:
        """Return the length in bits of the stream of ``sets`` sets, without the low bits."""

    def nbytes(self, sets: int) -> int:
        """Return the number of bytes that ``sets`` coded sets take together."""
        lows = packed_nbytes(sets * self.count, self.low_bits)
        return lows + packed_nbytes(self.stream_bits(sets), 1)

    @abstractmethod
    def encode(self, indices: Tensor, first: npt.NDArray[np.int64]) -> tuple[Tensor, Tensor | None]:
        """Encode ascending indices (n, sets, count), int64.

        Args:
            first: for each of the n rows, the set that is coded first, in case there is not room
                for all; the other sets follow in cyclic order.

        Returns:
            The bytes (n, nbytes(sets)), and whether there was room for each index, booleans
            (n, sets, count); None if there was room for all.
        """

    @abstractmethod
    def decode(
        self, octets: Tensor, sets: int, first: npt.NDArray[np.int64]
    ) -> tuple[Tensor, Tensor | None]:
        """Return the indices (n, sets, count), int64, and which are valid, as :meth:`encode` does.

        Damaged bytes give meaningless indices in ``range(universe)``, or raise: an accelerator
        writes to these places before the checksum is known.

        Raises:
            PayloadError: on the CPU, if the number of indices is wrong.
        """

    def _join(self, bits: Tensor, numbers: Tensor) -> Tensor:
        """Return bytes (n, nbytes): a stream of bits (n, stream_bits), then numbers' low bits."""
        lows = (numbers & ((1 << self.low_bits) - 1)).flatten(1)
        return torch.cat([pack_bits(bits), pack_codes(lows, self.low_bits)], dim=1)

    def _split(self, octets: Tensor, sets: int) -> tuple[Tensor, Tensor]:
        """Split bytes into the stream (n, stream_bits) and the low bits (n, sets * count)."""
        room = self.stream_bits(sets)
        split = packed_nbytes(room, 1)
        lows = unpack_codes(octets[:, split:], sets * self.count, self.low_bits)
        return unpack_bits(octets[:, :split], room), lows


class Bitmap(PlacesCode):
    """A bitmap of ``universe`` bits for each set; no bits if no place is kept, or every place."""

    low_bits = 0

    @property
    def _bits(self) -> int:
        """The size of a set's bitmap in bits."""
        return 0 if self.count in (0, self.universe) else self.universe

    def stream_bits(self, sets: int) -> int:
        return sets * self._bits

    def _shifts(self, device: torch.device) -> Tensor | int:
        """Return the number to add to each index's high bits to get its place in the bitmap."""
        return 0

    def encode(self, indices: Tensor, first: npt.NDArray[np.int64]) -> tuple[Tensor, Tensor | None]:
        rows, sets, _ = indices.shape
        bitmap = torch.zeros(rows, sets, self._bits, dtype=torch.bool, device=indices.device)
        if self._bits:
            places = (indices >> self.low_bits) + self._shifts(indices.device)
            bitmap.scatter_(2, places, True)
        return self._join(bitmap.flatten(1), indices), None

    def decode(
        self, octets: Tensor, sets: int, first: npt.NDArray[np.int64]
    ) -> tuple[Tensor, Tensor | None]:
        shape = octets.shape[0], sets, self.count
        if not self._bits:
            return torch.arange(self.count, device=octets.device).expand(shape), None
        bits, lows = self._split(octets, sets)
        places = set_places(bits.view(len(bits), sets, self._bits), self.count)
        highs = places - self._shifts(octets.device)
        found = (highs << self.low_bits) | lows.view(shape).long()
        # Damaged bytes may have too few high bits, or low ones from behind the end.
        return found.clamp_(0, self.universe - 1), None


class EliasFano(Bitmap):
    """The Elias-Fano code for ``count`` ascending distinct integers in ``range(universe)``."""

    @property
    def low_bits(self) -> int:  # type: ignore[override]  # zero for a plain bitmap
        return max(0, (self.universe // self.count).bit_length() - 1)

    @property
    def _bits(self) -> int:
        return self.count + ((self.universe - 1) >> self.low_bits)

    def _shifts(self, device: torch.device) -> Tensor | int:
        return torch.arange(self.count, device=device)
