"""The residuals that a step leaves: kept if all its buckets were healthy, else forgotten."""

from collections.abc import Callable

import torch

Commit = Callable[[torch.Tensor], None]
"""Stores the residuals of a bucket if its argument, a boolean scalar, is true."""


class Transaction:
    """Collects the buckets of a step, whose new residuals wait in their workspaces.

    A rank knows that a bucket is finite on all ranks only after the bucket's round, and earlier
    buckets of the step have been sent by then.  If one bucket is not finite the step is skipped, so
    no residual of the step may change: a residual that did would lack what was sent in vain.

    All ranks see the same health of every bucket, and so decide alike without a collective.
    """

    def __init__(self) -> None:
        self._commits: list[Commit] = []
        self._healths: list[torch.Tensor] = []

    def add(self, commit: Commit, health: torch.Tensor) -> None:
        """Add a bucket after its round.

        Args:
            commit: finds new residuals in the workspace, which must stay until :meth:`decide`.
            health: float32 scalar, 0 if the vectors of all ranks were finite, else NaN.
        """
        self._commits.append(commit)
        self.note(health)

    def note(self, health: torch.Tensor) -> None:
        """Let the step depend on tensors without residuals, too.

        Args:
            health: see :meth:`add`.
        """
        self._healths.append(health)

    def health(self) -> torch.Tensor:
        """Return 0 if all buckets so far were healthy, else NaN; float32 scalar."""
        if not self._healths:
            return torch.zeros(())
        device = self._healths[0].device
        return torch.stack([health.to(device) for health in self._healths]).sum()

    def decide(self, health: torch.Tensor) -> None:
        """Store the residuals of all buckets if ``health`` is finite, and forget the buckets."""
        commits, accept = self._commits, torch.isfinite(health)
        self.forget()
        for commit in commits:
            commit(accept)

    def forget(self) -> None:
        """Forget all buckets, whose residuals stay as they were before the step."""
        self._commits, self._healths = [], []
