"""The residuals that a step leaves: kept if all its buckets were healthy, else forgotten."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from comm_hooks.exchange.message import Message


class Transaction:
    """Collects the messages of a step, whose new residuals wait in their workspaces.

    A rank knows that a bucket is finite on all ranks only after the bucket's round, and earlier
    buckets of the step have been sent by then.  If one bucket is not finite the step is skipped, so
    no residual of the step may change: a residual that did would lack what was sent in vain.

    All ranks see the same health of every bucket, and so decide alike without a collective.
    """

    def __init__(self) -> None:
        self._messages: list[Message] = []
        self._healths: list[torch.Tensor] = []

    def add(self, message: Message, health: torch.Tensor) -> None:
        """Add a message whose round is over.

        Args:
            message: has left the new residuals in its workspace, which nothing may change before
                :meth:`decide`.
            health: float32 scalar, 0 if the vectors of all ranks were finite, else NaN.
        """
        self._messages.append(message)
        self._healths.append(health)

    def health(self) -> torch.Tensor:
        """Return 0 if all messages so far were healthy, else NaN; float32 scalar."""
        if not self._healths:
            return torch.zeros(())
        device = self._healths[0].device
        return torch.stack([health.to(device) for health in self._healths]).sum()

    def decide(self, health: torch.Tensor) -> None:
        """Store the residuals of all messages if ``health`` is finite, and forget the messages."""
        messages, accept = self._messages, torch.isfinite(health)
        self.forget()
        for message in messages:
            message.commit(accept)

    def forget(self) -> None:
        """Forget all messages, whose residuals stay as they were before the step."""
        self._messages, self._healths = [], []
