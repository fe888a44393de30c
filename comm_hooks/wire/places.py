"""The contract of a code for which places of a block are kept."""

from abc import ABC, abstractmethod

import numpy as np
import numpy.typing as npt
import torch


class PlacesCode(ABC):
    """The code for sets of ``count`` ascending distinct integers in ``range(universe)``.

    Its size follows from the number of sets alone, so ranks need not negotiate it.
    """

    universe: int
    count: int

    @abstractmethod
    def nbytes(self, sets: int) -> int:
        """Return the bytes that ``sets`` coded sets take together."""

    @abstractmethod
    def encode(
        self, indices: torch.Tensor, first: npt.NDArray[np.int64]
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Encode ascending indices (n, sets, count), int64.

        Args:
            first: for each of the n rows, the set that comes first where there may not be room for
                all; the others follow, around the end.

        Returns:
            The bytes (n, nbytes(sets)), and which of the indices there was room for, booleans
            (n, sets, count); None if for all.
        """

    @abstractmethod
    def decode(
        self, octets: torch.Tensor, sets: int, first: npt.NDArray[np.int64]
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Return the indices (n, sets, count), int64, and which of them there was room for.

        Bytes that are no code give indices that mean nothing, but lie in ``range(universe)``, or
        raise: an accelerator writes to where they say before it is known that they are damaged.

        Raises:
            PayloadError: on the CPU, if there are not as many indices as there should be.
        """
