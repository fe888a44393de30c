"""What a rank gives to a round on one bucket: prepared here, and nowhere else."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from comm_hooks.exchange.layout import Workspace
from comm_hooks.exchange.noise_hook import NoiseHook
from comm_hooks.kernels.residual import Residual
from comm_hooks.memory.base import Memory
from comm_hooks.memory.rows import Rows
from comm_hooks.randomness import Keys, derive_key, derive_keys
from comm_hooks.wire.header import PendingChecks
from comm_hooks.wire.stamp import Stamp


@dataclass(frozen=True)
class RoundContext:
    """On what context a bucket is averaged in one step.

    Attributes:
        stamp: what all payloads must have in common.
        memory: of this rank; None to remember nothing.
        scale: the factor by which the vectors are scaled at present.
        verify: make sure that what is remembered is finite, which takes a pass over it.
        limit: the largest element that the receiver of the mean can hold; what is above it is
            remembered.
        noise_hook: clips and adds noise on the way.
        checks: where what an accelerator has found in headers waits to be judged.
    """

    stamp: Stamp
    memory: Memory | None = None
    scale: float = 1.0
    verify: bool = False
    limit: float | None = None
    noise_hook: NoiseHook | None = None
    checks: PendingChecks = field(default_factory=PendingChecks)


class Message:
    """Vectors about to be sent: with their random keys, their health, and what a memory adds.

    Make it once the vectors are filled in: the constructor adds, in place, any residual that the
    compressor cannot add itself.  The memory adds to the ``groups`` only, and keeps what is left of
    them.

    Args:
        vectors: of this rank.
        keys: of each of their parts, one key per row.
        own_key: this rank's and round's own, for memories that draw.
        context: of the round.

    Raises:
        ValueError: if what is remembered is not finite (only with ``context.verify``): one such
            number would make all gradients NaN for ever.

    Attributes:
        matrices: of each part of the vectors.
        keys: see above.
        stamp: of the round.
        residuals: what is still to be added to each part before it is compressed; None without a
            memory.
    """

    def __init__(
        self, vectors: Workspace, keys: Sequence[Keys], own_key: int, context: RoundContext
    ) -> None:
        self.matrices = [part.matrix for part in vectors.parts()]
        self.keys = keys
        self.stamp = context.stamp
        self.residuals: list[Residual | None] | None = None
        self._vectors = vectors
        self._memory, self._scale, self._limit = context.memory, context.scale, context.limit
        self._own_key = own_key
        self._norms: list[torch.Tensor] | None = None
        if self._memory:
            self._compensate(self._memory, verify=context.verify)

    @classmethod
    def of(cls, vectors: Workspace, context: RoundContext, *, seed: int, rank: int) -> Message:
        """Return a rank's message with the keys that follow from a seed, in the context' step."""
        step = context.stamp.step
        keys = [derive_keys(seed, step, part.names) for part in vectors.parts()]
        # Of now: by the time the memory draws, the owner may have gone on to the next step.
        return cls(vectors, keys, derive_key(seed, step, f"memory of rank {rank}"), context)

    @property
    def health(self) -> torch.Tensor:
        """0 if all elements were finite, else NaN; float32 scalar, (1,).

        A norm that overflows float32 counts as infinite.
        """
        plain = [rows for rows in (self._vectors.exact, self._vectors.exempt) if rows]
        norms = [*self._row_norms(), *(row_norms(row.matrix) for row in plain)]
        return torch.cat([norm - norm for norm in norms]).sum()

    def add_residuals(self) -> None:
        """Add what is still to be added, in place: before the vectors are cut into shards."""
        for matrix, residual in zip(self.matrices, self.residuals or (), strict=False):
            if residual:
                residual.add_to(matrix)
        if self.residuals:
            self.residuals = [None] * len(self.residuals)

    def commit(self, accept: torch.Tensor) -> None:
        """Remember what this rank did not send, which is what the groups hold by now.

        To be called once; ``accept`` is a boolean scalar: whether all ranks' vectors were finite.
        """
        if self._memory:
            for rows, active in zip(self._vectors.groups, self._active, strict=True):
                self._memory.retain(rows, active & accept, self._scale, self._own_key)

    def give_back(self, *, ranks: int = 1, factor: float = 1.0) -> None:
        """Keep the elements of the mean, which the groups hold by now, within the context' limit.

        What is above it is remembered, on all ranks alike, and arrives later.  A mean that is not
        finite is left alone.

        Args:
            ranks: for how many ranks this one remembers it: for all, if nobody else has this mean.
            factor: by which the mean is multiplied afterwards.
        """
        if self._memory is None or self._limit is None:
            return
        limit = self._limit / factor
        for rows in self._vectors.groups:
            rest = rows.matrix - rows.matrix.clamp(-limit, limit)
            rest.nan_to_num_(nan=0.0, posinf=0.0, neginf=0.0)
            # Most often there is nothing.  On an accelerator nobody waits to find that out.
            if rest.device.type != "cpu" or rest.any():
                rows.matrix.sub_(rest)
                self._memory.give_back(rows, rest.mul_(ranks), self._scale)

    def _row_norms(self) -> list[torch.Tensor]:
        """Return the norms of the rows of each group, (n, 1), before anything was added."""
        if self._norms is None:
            self._norms = [row_norms(rows.matrix) for rows in self._vectors.groups]
        return self._norms

    def _compensate(self, memory: Memory, *, verify: bool) -> None:
        norms, groups = self._row_norms(), self._vectors.groups
        self._active = [memory.active(norm) for norm in norms]
        residuals = [
            memory.compensate(rows, active, self._scale)
            for rows, active in zip(groups, self._active, strict=True)
        ]
        if verify:
            for rows, residual, norm in zip(groups, residuals, norms, strict=True):
                _require_finite(rows, residual, norm)
        self.residuals = self._vectors.residuals(residuals)


def row_norms(matrix: torch.Tensor) -> torch.Tensor:
    """Return the norm of each row, (n, 1): zero or not, finite or not, in one pass."""
    return torch.stack(torch._foreach_norm(list(matrix.unbind())))[:, None]


def _require_finite(rows: Rows, residual: Residual | None, norm: torch.Tensor) -> None:
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
