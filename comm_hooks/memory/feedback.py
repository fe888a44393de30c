"""What a memory has to do with one round."""

from collections.abc import Sequence

from torch import Tensor

from comm_hooks.kernels.residual import Residual
from comm_hooks.layout import Rows, Workspace
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
        verify: whether to make sure that what is remembered is finite, which takes a pass over it.

    Raises:
        ValueError: if it is not: one such number would make all gradients NaN for ever.

    Attributes:
        residuals: what is still to be added to each part of the vectors before it is compressed.
    """

    def __init__(
        self,
        memory: Memory,
        vectors: Workspace,
        norms: Sequence[Tensor],
        scale: float,
        key: int,
        *,
        verify: bool = False,
    ) -> None:
        self._memory = memory
        self._groups = vectors.groups
        self._active = [memory.active(norm) for norm in norms]
        self._scale = scale
        self._key = key
        residuals = [
            memory.compensate(rows, active, scale)
            for rows, active in zip(self._groups, self._active, strict=True)
        ]
        if verify:
            for rows, residual, norm in zip(self._groups, residuals, norms, strict=True):
                _require_finite(rows, residual, norm)
        self.residuals = vectors.residuals(residuals)

    def settle(self, accept: Tensor) -> None:
        """Remember what this rank did not send, which is what the groups hold by now.

        To be called once; ``accept`` is a boolean scalar: whether all ranks' vectors were finite.
        """
        for rows, active in zip(self._groups, self._active, strict=True):
            self._memory.retain(rows, active & accept, self._scale, self._key)

    def give_back(self, limit: float, *, ranks: int = 1) -> None:
        """Keep the elements of the mean, which the groups hold by now, within ±limit.

        What is above it is remembered, on all ranks alike, and arrives later.  A mean that is not
        finite is left alone.

        Args:
            ranks: for how many ranks this one remembers it: for all, if nobody else has this mean.
        """
        for rows in self._groups:
            rest = rows.matrix - rows.matrix.clamp(-limit, limit)
            rest.nan_to_num_(nan=0.0, posinf=0.0, neginf=0.0)
            # Most often there is nothing.  On an accelerator nobody waits to find that out.
            if rest.device.type != "cpu" or rest.any():
                rows.matrix.sub_(rest)
                self._memory.give_back(rows, rest.mul_(ranks), self._scale)


def _require_finite(rows: Rows, residual: Residual | None, norm: Tensor) -> None:
    """Raise ``ValueError`` for a residual that is not finite, of vectors of these norms, (n, 1)."""
    # What has been added already is in the vectors, which may have been bad themselves.
    remembered = residual.vectors if residual else rows.matrix
    bad = ~remembered.isfinite().all(1)
    if not residual:
        bad &= norm.isfinite()[:, 0]
    for name, is_bad in zip(rows.names, bad.tolist(), strict=True):
        if is_bad:
            raise ValueError(
                f"the residual of {name!r} is not finite, and would make all gradients NaN for "
                "ever: load an older state"
            )
