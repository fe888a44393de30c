"""Checks that every step uses one batch of the Poisson loader: the next, whole, and once."""

from collections import deque
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils import _pytree as pytree
from torch.utils.weak import WeakTensorKeyDictionary

from comm_hooks.optim.private.errors import PrivacyError


@dataclass(eq=False)
class Ticket:
    """A record of a batch that a loader has drawn and that one step may use.

    Attributes:
        rows: the number of samples in the batch.
    """

    rows: int


# The batch of each known tensor: tensors from a loader, and those that a step was given instead,
# such as copies on another device.
_ticket_of = WeakTensorKeyDictionary()


class Tickets:
    """The batches that a loader has drawn and no step has used, in order.

    Accountants assume that every sample is in the batch of a step with probability q, once,
    independently of all other steps.  So every batch is used whole, once, and in its turn.

    A ticket is kept here and not in the batch, so that it survives loaders around loaders, which
    may fetch ahead, and copies to a device.  A batch is recognized by its tensors.  For copied or
    transformed tensors only the number of rows is compared with that of the next batch: a fresh
    copy of an old batch with as many rows as the next one is not detected.
    """

    def __init__(self) -> None:
        self._waiting: deque[Ticket] = deque()

    def start(self) -> None:
        """Begin another iteration of the loader, and drop the tickets of unused batches."""
        self._waiting.clear()

    def issue(self, batch: Any) -> Ticket:
        """Add the batch that was just drawn, and return its ticket."""
        leaves = _tensors(batch)
        ticket = Ticket(next((len(leaf) for leaf in leaves if leaf.dim()), 0))
        _mark(leaves, ticket)
        self._waiting.append(ticket)
        return ticket

    def next(self, batch: Any, rows: int) -> Ticket:
        """Return the next ticket; raise ``PrivacyError`` unless it is that of this batch."""
        leaves = _tensors(batch)
        turn = self._waiting[0] if self._waiting else None
        known = [ticket for leaf in leaves if (ticket := _ticket_of.get(leaf)) is not None]
        if turn is None or (known and all(ticket not in self._waiting for ticket in known)):
            raise PrivacyError(
                "no drawn batch is left, or this one was used or discarded before or comes from "
                "another loader: take every batch from the loader that make_private() returned "
                "with this optimizer, and each for one step"
            )
        if (known and turn not in known) or rows != turn.rows:
            raise PrivacyError(
                f"the next drawn batch has {turn.rows} samples, and the batch that was passed has "
                f"{rows} or is another batch: use every drawn batch, whole and in order. An empty "
                "batch is a step, too; begin a new iteration to leave out the rest of this one"
            )
        _mark(leaves, turn)
        return turn

    def spend(self, ticket: Ticket) -> None:
        """Remove a ticket, so that its batch is not used again."""
        if ticket in self._waiting:
            self._waiting.remove(ticket)


class StepBatch:
    """Keeps the ticket of the batch that a step has used.

    Args:
        tickets: the tickets of the loader; None if the caller is responsible for the batches.
    """

    def __init__(self, tickets: Tickets | None) -> None:
        self._tickets = tickets
        self.restart()

    @property
    def has_begun(self) -> bool:
        """Whether the step has its batch."""
        return self._ticket is not None

    def restart(self) -> None:
        """Forget the batch: one that failed half way may be tried again."""
        self._ticket: Ticket | None = None

    def admit(self, rows: int, batch: Any = None) -> None:
        """Let a batch into the step.

        Args:
            rows: the number of samples that are added.
            batch: their tensors; None for an empty batch that was not passed on.

        Raises:
            PrivacyError: for all but one drawn batch, whole.
        """
        if self._tickets is None:
            return
        if self._ticket is not None:
            raise PrivacyError(
                "this step has a batch already, and every sample may count once: call step() "
                "before the next one, or zero_grad() to discard it. Add up losses on one batch in "
                "the loss function; for a batch too large for memory, set micro_batch_size"
            )
        self._ticket = self._tickets.next(batch, rows)

    def discard(self) -> None:
        """Give up the batch without a release, so that no step can use it."""
        if self._tickets is not None and self._ticket is not None:
            self._tickets.spend(self._ticket)
        self.restart()

    def require_batch(self) -> None:
        """Raise ``PrivacyError`` unless the step has a batch, or the next one is empty."""
        if not self.has_begun:
            self.admit(0)

    def spend(self, samples: int) -> None:
        """End the step, and remove the batch's ticket.

        Args:
            samples: the number of samples in the sum that is to be released.

        Raises:
            PrivacyError: if the batch has another number of samples.
        """
        ticket = self._ticket
        self.restart()
        if self._tickets is None or ticket is None:
            return
        self._tickets.spend(ticket)
        if samples != ticket.rows:
            raise PrivacyError(
                f"the sum is over {samples} samples, and the batch has {ticket.rows}: gradients "
                "were added without this optimizer's backward(). Nothing was released, and the "
                "batch is discarded"
            )


def _tensors(batch: Any) -> list[torch.Tensor]:
    return [leaf for leaf in pytree.tree_leaves(batch) if isinstance(leaf, torch.Tensor)]


def _mark(leaves: list[torch.Tensor], ticket: Ticket) -> None:
    for leaf in leaves:
        _ticket_of[leaf] = ticket
