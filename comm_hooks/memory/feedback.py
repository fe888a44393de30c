"""What a memory has to do with one round."""

from collections.abc import Sequence

import torch

from comm_hooks.layout import Layout, Rows
from comm_hooks.memory.base import Memory


class Feedback:
    """A memory's share in a round: what it adds to the vectors, and what it keeps of them.

    To be made when the vectors are there: it begins by adding, in place, what cannot be left to
    who compresses them.

    Args:
        memory: of this rank.
        layout: what the round is about.
        norms: of the rows of each group, (n, 1).
        scale: the factor by which the vectors are scaled at present.
        key: this rank's and round's own, for memories that draw.
        groups: what to work on in place of the layout's own groups: shards of them, say.

    Attributes:
        residuals: what is still to be added to each part of the layout before it is compressed.
    """

    def __init__(
        self,
        memory: Memory,
        layout: Layout,
        norms: Sequence[torch.Tensor],
        scale: float,
        key: int,
        groups: Sequence[Rows] | None = None,
    ) -> None:
        self._memory = memory
        self._groups = layout.groups if groups is None else groups
        self._active = [memory.active(norm) for norm in norms]
        self._scale = scale
        self._key = key
        self.residuals = layout.residuals(
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
