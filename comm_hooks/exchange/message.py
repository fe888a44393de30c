"""The vectors that one rank sends in a round: residuals, random keys, check for NaN."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from comm_hooks.exchange.layout import Layout, Workspace
from comm_hooks.exchange.noise_hook import NoiseHook
from comm_hooks.exchange.transaction import Transaction
from comm_hooks.kernels.magnitudes import magnitudes
from comm_hooks.kernels.residual import Residual
from comm_hooks.memory.base import Memory
from comm_hooks.memory.rows import Rows
from comm_hooks.randomness import Keys, derive_key, derive_keys
from comm_hooks.wire.header import PendingChecks
from comm_hooks.wire.stamp import Stamp


@dataclass(frozen=True)
class RoundContext:
    """The settings of one round of an exchange on one bucket.

    Attributes:
        stamp: header words of the payloads, equal on all ranks.
        memory: keeps the residuals of this rank; None for a round without residuals.
        scale: the loss scale by which the vectors are multiplied.
        verify: whether residuals are checked to be finite, in one more pass.
        limit: the largest element that the mean's dtype can hold; the excess joins the residual.
        noise_hook: clips and adds noise, for private training; None: neither.
        checks: the headers on an accelerator that are still to be checked.
        transaction: keeps the messages of a step with several buckets until its end; None: the
            bucket is the whole step.
        mean: receives the mean, if it is not to overwrite the vectors.
    """

    stamp: Stamp
    memory: Memory | None = None
    scale: float = 1.0
    verify: bool = False
    limit: float | None = None
    noise_hook: NoiseHook | None = None
    checks: PendingChecks = field(default_factory=PendingChecks)
    transaction: Transaction | None = None
    mean: Layout | None = None

    def finish(self, message: Message, health: torch.Tensor) -> None:
        """Commit a message now, or with all others of the step."""
        if self.transaction:
            self.transaction.add(message.commit, health)
        else:
            message.commit(torch.isfinite(health))


class Message:
    """The vectors that a rank is about to compress and send, with random keys and residuals.

    The constructor adds, in place, any residual that the compressor cannot add itself, so make it
    after the vectors are filled in.  Only parameters to compress (``groups``) have residuals.

    Args:
        vectors: the workspace with the vectors of this rank.
        keys: the random keys of each part of the vectors, one key per row.
        own_key: a random key of this rank and round, for residuals that are rounded at random.
        context: the settings of the round.

    Raises:
        ValueError: if a residual is not finite (only with ``context.verify``): it would make all
            gradients NaN for ever.

    Attributes:
        matrices: the matrix of each part of the vectors.
        keys: the random keys of each part of the vectors.
        stamp: header words of the round, equal on all ranks.
        residuals: those still to be added to each part before compression; None without a memory.
    """

    def __init__(
        self, vectors: Workspace, keys: Sequence[Keys], own_key: int, context: RoundContext
    ) -> None:
        self.matrices = vectors.matrices()
        self.keys = keys
        self.stamp = context.stamp
        self.residuals: list[Residual | None] | None = None
        self._vectors = vectors
        self._memory, self._scale, self._limit = context.memory, context.scale, context.limit
        self._own_key = own_key
        self._sizes: list[torch.Tensor] | None = None
        self._gives_back = False
        if self._memory:
            self._compensate(self._memory, verify=context.verify)

    @classmethod
    def of(cls, vectors: Workspace, context: RoundContext, *, seed: int, rank: int) -> Message:
        """Return a message with random keys derived from seed, step, rank and parameter names."""
        step = context.stamp.step
        keys = [derive_keys(seed, step, part.names) for part in vectors.parts()]
        # Derived now: the owner may be in the next step when the memory draws.
        return cls(vectors, keys, derive_key(seed, step, f"memory of rank {rank}"), context)

    @property
    def health(self) -> torch.Tensor:
        """0 if all elements were finite before residuals were added, else NaN; float32, ()."""
        plain = [rows for rows in (self._vectors.exact, self._vectors.exempt) if rows]
        sizes = [*self._magnitudes(), *(magnitudes_of_rows(row.matrix) for row in plain)]
        return torch.cat([size - size for size in sizes]).sum()

    def add_residuals(self) -> None:
        """Add the residuals in place, before the vectors are cut into shards."""
        for matrix, residual in zip(self.matrices, self.residuals or (), strict=False):
            if residual:
                residual.add_to(matrix)
        if self.residuals:
            self.residuals = [None] * len(self.residuals)

    def commit(self, accept: torch.Tensor) -> None:
        """Store the new residuals, which encoding has left in the workspace; call it once.

        Args:
            accept: boolean scalar: whether the vectors of all ranks were finite.
        """
        if self._memory is None:
            return
        for rows, active in zip(self._vectors.groups, self._active, strict=True):
            self._memory.retain(rows, active & accept, self._scale, self._own_key)
            if self._gives_back:
                # A row that took no part keeps its residual, and adds the excess of the mean.
                excess = rows.matrix * (accept & ~active)
                self._memory.give_back(rows, excess, self._scale)

    def give_back(self, mean: Workspace, *, ranks: int = 1, factor: float = 1.0) -> None:
        """Clamp the mean to ``context.limit``, before :meth:`commit`.

        The excess is added to the residuals of all ranks, so later rounds send it.  A mean
        that is not finite stays as it is.

        Args:
            mean: a workspace of the same parameters with the mean.
            ranks: a factor of the excess in this rank's residual: the number of ranks if only this
                rank has the mean, else 1.
            factor: the factor by which the caller multiplies the mean afterwards.
        """
        if self._memory is None or self._limit is None:
            return
        limit = self._limit / factor
        groups = zip(self._vectors.groups, self._active, mean.groups, strict=True)
        for residuals, active, means in groups:
            excess = means.matrix - means.matrix.clamp(-limit, limit)
            excess.nan_to_num_(nan=0.0, posinf=0.0, neginf=0.0)
            # Most often there is no excess.  An accelerator is not waited for to find out.
            if excess.device.type != "cpu" or excess.any():
                means.matrix.sub_(excess)
                residuals.matrix.mul_(active).add_(excess, alpha=ranks)
                self._gives_back = True

    def _magnitudes(self) -> list[torch.Tensor]:
        """Return the magnitudes of each group's rows, (n, 1), before residuals were added."""
        if self._sizes is None:
            self._sizes = [magnitudes_of_rows(rows.matrix) for rows in self._vectors.groups]
        return self._sizes

    def _compensate(self, memory: Memory, *, verify: bool) -> None:
        sizes, groups = self._magnitudes(), self._vectors.groups
        self._active = [memory.active(size) for size in sizes]
        residuals = [
            memory.compensate(rows, active, self._scale)
            for rows, active in zip(groups, self._active, strict=True)
        ]
        if verify:
            for rows, residual, size in zip(groups, residuals, sizes, strict=True):
                _require_finite(rows, residual, size)
        self.residuals = self._vectors.residuals(residuals)


def magnitudes_of_rows(matrix: torch.Tensor) -> torch.Tensor:
    """Return the magnitude of each row, (n, 1): one pass finds rows that are 0 or not finite."""
    return magnitudes(matrix.unbind())[:, None]


def _require_finite(rows: Rows, residual: Residual | None, size: torch.Tensor) -> None:
    """Raise ``ValueError`` if a residual is not finite; ``size``: the rows' magnitudes, (n, 1)."""
    # A residual that was added is in the vectors, which may not have been finite themselves.
    checked = residual.vectors if residual else rows.matrix
    bad = ~checked.isfinite().all(1)
    if not residual:
        bad &= size.isfinite()[:, 0]
    for name, is_bad in zip(rows.names, bad.tolist(), strict=True):
        if is_bad:
            raise ValueError(
                f"the error-feedback residual of {name!r} is not finite, and would make all "
                "gradients NaN for ever: load an older state"
            )
