"""The interface of payload headers, which every receiver checks before it decodes."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from comm_hooks.wire.stamp import Stamp


class PendingChecks:
    """Headers on an accelerator that are still to be checked.

    They are copied to the CPU while the accelerator computes, and checked in the order of their
    rounds, even if their buckets no longer exist.
    """

    def __init__(self) -> None:
        self._pending: list[tuple[int, Tensor, torch.Event, Callable[[Tensor], None]]] = []

    def __reduce__(self) -> tuple[type["PendingChecks"], tuple[()]]:
        # Events and pinned memory belong to this process.
        return PendingChecks, ()

    @staticmethod
    def must_wait(found: Tensor) -> bool:
        """Return whether reading ``found`` would wait for an accelerator."""
        return found.device.type != "cpu"

    def add(self, found: Tensor, step: int, check: Callable[[Tensor], None]) -> None:
        """Let :meth:`wait` call ``check`` with a CPU copy of ``found``, the headers of ``step``."""
        copy = torch.empty(found.shape, dtype=found.dtype, pin_memory=True)
        copy.copy_(found, non_blocking=True)
        event = torch.Event(found.device)
        event.record()
        self._pending.append((step, copy, event, check))

    def wait(self, *, before: int | None = None) -> None:
        """Wait for the headers of all steps, or of steps before ``before``, and check them.

        Raises:
            PayloadError: for the first header that is wrong; the others are dropped.
        """
        pending = self._pending
        due = [each for each in pending if before is None or each[0] < before]
        self._pending = [each for each in pending if not (before is None or each[0] < before)]
        for _, copy, event, check in due:
            event.synchronize()
            check(copy)


class Header(ABC):
    """The header that every rank writes before its payload; all ranks check it the same way.

    On the CPU they check it at once.  On an accelerator a payload that does not fit turns the mean
    into NaN, and the next step raises (:class:`PendingChecks`): optimizers that check the gradient
    skip the step, as a ``GradScaler`` does; other optimizers make their parameters NaN.

    Args:
        ranks: the global ranks of the participants, in order.
        place: the index of this rank among them.
    """

    def __init__(self, ranks: Sequence[int], place: int) -> None:
        self._ranks = ranks
        self._place = place

    @property
    @abstractmethod
    def nbytes(self) -> int:
        """The size of the header in bytes."""

    @abstractmethod
    def write_(self, payloads: Tensor, stamp: Stamp, health: Tensor) -> None:
        """Write the headers of payloads (M, nbytes), uint8, after their bodies.

        Args:
            payloads: the payloads of this rank; nbytes is a multiple of 8.
            stamp: the stamp of this rank.
            health: float32 scalar on their device: 0 where the rank's vector is finite, else NaN.
        """

    def check(
        self, payloads: Tensor, stamp: Stamp, checks: PendingChecks, senders: str = "rank"
    ) -> Tensor:
        """Check that all payloads have this stamp; return 0 if all vectors were finite, else NaN.

        Args:
            payloads: those received: (N, nbytes), uint8, in rank order, or their sum, (1, nbytes).
            stamp: the stamp of this rank.
            checks: receives headers that cannot be checked at once.
            senders: the word for a sender in errors, such as "rank".

        Raises:
            PayloadError: on all ranks, if payloads' stamps differ; on receivers of a damaged one.
        """
        found, health = self._read(payloads)
        if not checks.must_wait(found):
            self._require_fit(found, stamp, senders)
            return health
        checks.add(found, stamp.step, lambda copy: self._require_fit(copy, stamp, senders))
        return torch.where(self._fits(found, stamp), health, torch.nan)

    @abstractmethod
    def _read(self, payloads: Tensor) -> tuple[Tensor, Tensor]:
        """Return the header words to check, a small tensor, and 0 if all are finite, else NaN."""

    @abstractmethod
    def _require_fit(self, found: Tensor, stamp: Stamp, senders: str) -> None:
        """Raise ``PayloadError`` if ``found``, a CPU tensor of :meth:`_read`, has another stamp."""

    @abstractmethod
    def _fits(self, found: Tensor, stamp: Stamp) -> Tensor:
        """Return whether ``found`` has this stamp: a boolean tensor, (), without waiting."""
