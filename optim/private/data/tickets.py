"""Checks that every step uses one batch of the Poisson loader: the next, whole, and once."""

import functools
import itertools
import operator
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils import _pytree as pytree
from torch.utils.weak import WeakTensorKeyDictionary

from comm_hooks.optim.private.errors import PrivacyError

Read = Callable[[int], Any]
"""Reads a sample of a batch again, by its row, as a batch of its own."""

_AHEAD = 8
"""The latest batches that are kept until they are used; older ones are read again."""


@dataclass(eq=False)
class Ticket:
    """A record of a batch that a loader has drawn and that one step may use.

    Attributes:
        rows: the number of samples in the batch.
    """

    rows: int


@dataclass(eq=False)
class _Drawn:
    """A batch as the loader gave it: its tensors, if they are kept, and a function to read rows."""

    leaves: Sequence[torch.Tensor]
    read: Callable[[Sequence[int]], Any]
    rows: int

    def reader(self, batch: Any) -> Read:
        """Return a function that reads a sample with the structure, devices and dtypes of a batch.

        It raises ``PrivacyError`` if a tensor of that batch is none that the loader gave.
        """
        passed, structure = pytree.tree_flatten(batch)
        sources = functools.cache(lambda: [self._source(leaf) for leaf in passed])

        def read(row: int) -> Any:
            places, found = sources(), _tensors(self.read([row]))
            pairs = zip(places, passed, strict=True)
            return pytree.tree_unflatten(
                [self._like(found[place], leaf, place) for place, leaf in pairs], structure
            )

        return read

    def _like(self, one: torch.Tensor, passed: torch.Tensor, place: int) -> torch.Tensor:
        """Return a tensor that was read again as the tensor was passed that it stands for."""
        one, given = one.to(passed.device, passed.dtype), self.leaves[place].shape
        if passed.shape == given:
            return one
        if one[0].numel() != passed[0].numel():
            raise PrivacyError(
                f"DPOptimizer: the loader gave rows of shape {tuple(given[1:])}, padded to each "
                f"other, and backward() got {tuple(passed.shape[1:])}: reshape them in collate_fn "
                "or in the loss function, where samples can be compared with themselves alone"
            )
        return one.reshape(1, *passed.shape[1:])

    def _source(self, passed: torch.Tensor) -> int:
        """Return the place of the tensor that was passed among those that the loader gave."""
        self.leaves = self.leaves or _tensors(self.read(range(self.rows)))
        for is_it in (operator.is_, _has_values_of):
            for place, leaf in enumerate(self.leaves):
                if is_it(passed, leaf):
                    return place
        raise PrivacyError(
            "DPOptimizer: the batch is not as the loader gave it, so that a row may depend on the "
            "other samples: pass its tensors, on any device and in any dtype, and transform "
            "samples in the data set, in collate_fn or in the loss function"
        )


def _has_values_of(passed: torch.Tensor, leaf: torch.Tensor) -> bool:
    """Return whether a tensor has another's values, on its own device, in its dtype and shape."""
    if len(leaf) != len(passed) or leaf.numel() != passed.numel():
        return False
    given = leaf.to(passed).reshape(passed.shape)
    return bool(((given == passed) | ((given != given) & (passed != passed))).all())


# The batch of each known tensor: tensors from a loader, and those that a step was given instead,
# such as copies on another device.
_ticket_of = WeakTensorKeyDictionary()


class Tickets:
    """The batches that a loader has drawn and no step has used, in order.

    Accountants assume that every sample is in the batch of a step with probability q, once,
    independently of all other steps.  So every batch is used whole, once, and in its turn.

    A ticket is kept here and not in the batch, so that it survives loaders around loaders, which
    may fetch ahead, and copies to a device.  A batch is recognized by its tensors.  Of copies only
    the number of rows is compared with that of the next batch, and their values in those batches
    whose samples are differentiated alone (:meth:`reader`).

    Args:
        are_checked: False if the caller is responsible for the batches, and no batch is refused.
    """

    def __init__(self, *, are_checked: bool = True) -> None:
        self._are_checked = are_checked
        self._waiting: deque[Ticket] = deque()
        self._drawn: dict[Ticket, _Drawn] = {}
        self.has_steps = False
        """Whether an optimizer takes steps with these batches."""
        # Of the step in progress.
        self._current: Ticket | None = None

    @property
    def has_begun(self) -> bool:
        """Whether the step in progress has its batch."""
        return self._current is not None

    def start(self) -> None:
        """Begin another iteration of the loader.

        Raises:
            PrivacyError: if batches were delivered and not used.
        """
        if self._waiting and self.has_steps:
            raise PrivacyError(
                f"PoissonLoader: {len(self._waiting)} drawn batches were taken from the loader and "
                "not used, and a new iteration would drop them. Which samples are in a step may "
                "not depend on what the batches hold: use every batch, also an empty one; look at "
                "samples in loader.dataset"
            )
        self._waiting.clear()
        self._drawn.clear()

    def issue(self, batch: Any, read: Callable[[Sequence[int]], Any] | None = None) -> Ticket:
        """Add the batch that was just drawn, and return its ticket.

        Args:
            batch: the batch.
            read: reads samples of it again, by their rows, as a batch of their own.
        """
        leaves = _tensors(batch)
        ticket = Ticket(next((len(leaf) for leaf in leaves if leaf.dim()), 0))
        if read is not None:
            self._drawn[ticket] = _Drawn(leaves, read, ticket.rows)
            if len(self._drawn) > _AHEAD:
                next(itertools.islice(reversed(self._drawn.values()), _AHEAD, None)).leaves = ()
        _mark(leaves, ticket)
        self._waiting.append(ticket)
        return ticket

    def admit(self, rows: int, batch: Any = None) -> None:
        """Assign a batch to the step in progress, after checks.

        Args:
            rows: the number of samples in the batch.
            batch: their tensors; None for an empty batch that was not passed to ``backward()``.

        Raises:
            PrivacyError: if it is not the next drawn batch, whole, or the step has a batch already.
        """
        if not self._are_checked:
            return
        if self.has_begun:
            raise PrivacyError(
                "DPOptimizer: this step has a batch already, and every sample may count once: call "
                "step() before the next batch, or zero_grad() to discard it. Add up losses on one "
                "batch in the loss function; set micro_batch_size for a batch too large for memory"
            )
        leaves = _tensors(batch)
        turn = self._waiting[0] if self._waiting else None
        known = [ticket for leaf in leaves if (ticket := _ticket_of.get(leaf)) is not None]
        if turn is None or (known and all(ticket not in self._waiting for ticket in known)):
            raise PrivacyError(
                "DPOptimizer: no drawn batch is left, or this one was used or discarded before or "
                "comes from another loader: take every batch from the loader that make_private() "
                "returned with this optimizer, and use it in one step only"
            )
        if (known and turn not in known) or rows != turn.rows:
            raise PrivacyError(
                f"DPOptimizer: the next drawn batch has {turn.rows} samples, and the batch that "
                f"was passed has {rows} or is another batch: use every drawn batch, whole and in "
                "order. An empty batch is a step, too"
            )
        _mark(leaves, turn)
        self._current = turn

    def reader(self, batch: Any) -> Read | None:
        """Return a function that reads a sample of the step's batch again, as a batch of its own.

        It raises ``PrivacyError`` if the batch that was passed is not as the loader gave it.
        """
        drawn = self._drawn.get(self._current) if self._current else None
        return None if drawn is None else drawn.reader(batch)

    def restart(self) -> None:
        """Take the batch back from the step, so that it can be used again after a failure."""
        self._current = None

    def discard(self) -> None:
        """Give up the step's batch without a release, so that no step can use it."""
        if self._current is not None:
            self.spend(self._current)
        self.restart()

    def finish(self, samples: int) -> None:
        """End the step, so that no other can use its batch.

        Args:
            samples: the number of samples in the sum that is to be released.

        Raises:
            PrivacyError: if the batch has another number of samples.
        """
        ticket = self._current
        self.discard()
        if ticket is not None and samples != ticket.rows:
            raise PrivacyError(
                f"DPOptimizer: the sum is over {samples} samples, and the batch has {ticket.rows}: "
                "gradients were added without this optimizer's backward(). Nothing was released, "
                "and the batch is discarded: add gradients with DPOptimizer.backward(batch) only"
            )

    def spend(self, ticket: Ticket) -> None:
        """Remove a ticket, so that its batch is not used again."""
        self._drawn.pop(ticket, None)
        if ticket in self._waiting:
            self._waiting.remove(ticket)


def _tensors(batch: Any) -> list[torch.Tensor]:
    return [leaf for leaf in pytree.tree_leaves(batch) if isinstance(leaf, torch.Tensor)]


def _mark(leaves: list[torch.Tensor], ticket: Ticket) -> None:
    for leaf in leaves:
        _ticket_of[leaf] = ticket
