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
        loader: the tickets of the loader that drew the batch.
        rows: the number of samples in the batch.
    """

    loader: "Tickets"
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
        ticket = Ticket(self, _rows(leaves))
        _mark(leaves, ticket)
        self._waiting.append(ticket)
        return ticket

    def next(self, leaves: list[torch.Tensor], rows: int) -> Ticket:
        """Return the next ticket, after a check that it belongs to a batch of these tensors.

        Args:
            leaves: the tensors of the batch; [] for an empty batch that was not passed on.
            rows: the number of samples in the batch.

        Raises:
            PrivacyError: if the batch is not the next one.
        """
        turn = self._waiting[0] if self._waiting else None
        known = [ticket for leaf in leaves if (ticket := _ticket_of.get(leaf)) is not None]
        if known and turn not in known:
            if all(ticket.loader is not self for ticket in known):
                raise PrivacyError(
                    "the batch was drawn by the loader of another make_private(): iterate over the "
                    "loader that came with this optimizer"
                )
            if all(ticket not in self._waiting for ticket in known):
                raise PrivacyError(
                    "the batch was used or discarded before, or a later iteration has begun: draw "
                    "the next one from the loader. A batch is good for one step"
                )
        if turn is None:
            raise PrivacyError(
                "no drawn batch is left: take every batch from the loader that make_private() "
                "returned with this optimizer, and each for one step"
            )
        if (known and turn not in known) or rows != turn.rows:
            raise PrivacyError(
                f"the next drawn batch has {turn.rows} samples, and the batch that was passed has "
                f"{rows} or is another batch: use every drawn batch, whole and in order. An empty "
                "batch is a step, too; begin a new iteration to leave out the rest of this one"
            )
        return turn

    def spend(self, ticket: Ticket) -> None:
        """Remove a ticket, so that its batch is not used again."""
        if ticket in self._waiting:
            self._waiting.remove(ticket)


class StepBatch:
    """The batch of the step in progress, and the rows that it has used so far.

    Args:
        tickets: the tickets of the loader; None if the caller is responsible for the batches.
    """

    def __init__(self, tickets: Tickets | None) -> None:
        self._tickets = tickets
        self.restart()

    @property
    def has_begun(self) -> bool:
        """Whether the step has used at least a part of its batch."""
        return self._ticket is not None

    def restart(self) -> None:
        """Forget the batch and its used rows: a batch that failed half way may be tried again."""
        self._ticket: Ticket | None = None
        # Kept alive, since its rows are recognized by their place in memory.
        self._whole: list[torch.Tensor] = []
        self._used: set[int] = set()

    def admit(self, rows: int, batch: Any = None, of: Any = None) -> None:
        """Add a batch, or a part of one, to the step.

        Args:
            rows: the number of samples that are added.
            batch: the samples' tensors; None for an empty batch that was not passed on.
            of: the whole batch, if ``batch`` is a part of it.

        Raises:
            PrivacyError: for anything but the next drawn batch, whole or in disjoint parts.
        """
        if self._tickets is None:
            return
        leaves = _tensors(batch)
        whole = leaves if of is None else _tensors(of)
        if self._ticket is None:
            self._ticket = self._tickets.next(whole, rows if of is None else _rows(whole))
            self._whole = whole
            _mark(whole, self._ticket)
        elif of is None or not _is_same(whole, self._whole):
            raise PrivacyError(
                "this step has a batch already, and every sample may count once: call step() "
                "before the next one, or zero_grad() to discard it. Add up losses on one batch in "
                "the loss function, and pass parts of it as backward(part, of=batch)"
            )
        places = set(range(rows)) if of is None else _places(leaves, whole)
        if len(places) != rows or places & self._used:
            raise PrivacyError(
                f"a part of the batch has samples twice, or that were used before: its rows are "
                f"{sorted(places)} for {rows} samples. Parts must be disjoint"
            )
        self._used |= places

    def discard(self) -> None:
        """Give up the batch without a release, so that no step can use it."""
        if self._tickets is not None and self._ticket is not None:
            self._tickets.spend(self._ticket)
        self.restart()

    def require_whole(self) -> None:
        """Raise ``PrivacyError`` unless the step has a drawn batch with all of its samples."""
        if self._tickets is None:
            return
        if self._ticket is None:
            self.admit(0)
        assert self._ticket is not None
        if len(self._used) != self._ticket.rows:
            raise PrivacyError(
                f"only {len(self._used)} of the batch's {self._ticket.rows} samples were passed to "
                "backward(): whether a sample counts must not depend on the others. Pass the rest "
                "before step(), or zero_grad() to discard the batch"
            )

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


def _rows(leaves: list[torch.Tensor]) -> int:
    return next((len(leaf) for leaf in leaves if leaf.dim()), 0)


def _mark(leaves: list[torch.Tensor], ticket: Ticket) -> None:
    for leaf in leaves:
        _ticket_of[leaf] = ticket


def _is_same(one: list[torch.Tensor], other: list[torch.Tensor]) -> bool:
    return len(one) == len(other) and all(a is b for a, b in zip(one, other, strict=True))


def _places(part: list[torch.Tensor], whole: list[torch.Tensor]) -> set[int]:
    """Return the row numbers in ``whole`` of the rows of ``part``, found by memory addresses."""
    found = {
        frozenset(_rows_at(some, of))
        for some, of in zip(part, whole, strict=False)
        if len(some) == 0 or of.stride(0) != 0
    }
    if len(part) != len(whole) or len(found) != 1 or None in next(iter(found)):
        raise PrivacyError(
            "the part is not known to be one of the batch: move or transform the whole batch "
            "first, and pass slices of its tensors (the same rows of all), as in "
            "backward([t[:8] for t in batch], of=batch)"
        )
    return {place for place in next(iter(found)) if place is not None}


def _rows_at(part: torch.Tensor, whole: torch.Tensor) -> list[int | None]:
    if len(part) == 0:
        return []
    if (part.dtype, part.device, part.shape[1:], part.stride()[1:]) != (
        whole.dtype,
        whole.device,
        whole.shape[1:],
        whole.stride()[1:],
    ):
        return [None]
    size = part.element_size()
    step = whole.stride(0) * size
    found: list[int | None] = []
    for row in range(len(part)):
        distance = part.data_ptr() + row * part.stride(0) * size - whole.data_ptr()
        place, rest = divmod(distance, step)
        found.append(place if rest == 0 and 0 <= place < len(whole) else None)
    return found
