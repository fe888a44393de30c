"""What a memory has to do with one round."""

from collections.abc import Sequence

import torch

from comm_hooks.layout import Workspace
from comm_hooks.memory.base import Memory


class Feedback:
    """A memory's share in a round: what it adds to the vectors, and what it keeps of them.

    To be made when the vectors are there: it begins by adding, in place, what cannot be left to
    who compresses them.

    Args:
        memory: of this rank.
        vectors: of this rank.
        norms: of the rows of each group of them, (n, 1).
        scale: the factor by which the vectors are scaled at present.
        key: this rank's and round's own, for memories that draw.

    Attributes:
        residuals: what is still to be added to each part of the vectors before it is compressed.
    """

    def __init__(
        self,
        memory: Memory,
        vectors: Workspace,
        norms: Sequence[torch.Tensor],
        scale: float,
        key: int,
    ) -> None:
        self._memory = memory
        self._groups = vectors.groups
        self._active = [memory.active(norm) for norm in norms]
        self._scale = scale
        self._key = key
        self.residuals = vectors.residuals(
            [
                memory.compensate(rows, active, scale)
                for rows, active in zip(self._groups, self._active, strict=True)
            ]
        )

    def settle(self, accept: torch.Tensor) -> None:
        """Remember what this rank did not send, which is what the groups hold by now.

        To be called once; ``accept`` is a boolean scalar: whether all ranks' vectors were finite.
        """
        for rows, active in zip(self._groups, self._active, strict=True):
            self._memory.retain(rows, active & accept, self._scale, self._key)
