"""One bit for each place: the best there is where about half of them are kept."""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from comm_hooks.kernels.bits import pack_bits, packed_nbytes, set_places, unpack_bits
from comm_hooks.wire.places import PlacesCode


@dataclass(frozen=True)
class Bitmap(PlacesCode):
    """``universe`` bits for each set; nothing at all where no place is kept, or every one.

    Example::

        >>> Bitmap(universe=16, count=9).nbytes(sets=2), Bitmap(universe=16, count=16).nbytes(2)
        (4, 0)
    """

    universe: int
    count: int

    @property
    def _is_trivial(self) -> bool:
        return self.count in (0, self.universe)

    def nbytes(self, sets: int) -> int:
        return 0 if self._is_trivial else packed_nbytes(sets * self.universe, 1)

    def encode(
        self, indices: torch.Tensor, first: npt.NDArray[np.int64]
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        rows, sets, _ = indices.shape
        if self._is_trivial:
            return indices.new_empty(rows, 0, dtype=torch.uint8), None
        bitmap = torch.zeros(
            rows, sets, self.universe, dtype=torch.bool, device=indices.device
        ).scatter_(2, indices, True)
        return pack_bits(bitmap.flatten(1)), None

    def decode(
        self, octets: torch.Tensor, sets: int, first: npt.NDArray[np.int64]
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        rows = octets.shape[0]
        if self._is_trivial:
            every = torch.arange(self.count, device=octets.device)
            return every.expand(rows, sets, self.count), None
        bits = unpack_bits(octets[:, : self.nbytes(sets)], sets * self.universe)
        return set_places(bits.view(rows, sets, self.universe), self.count), None
