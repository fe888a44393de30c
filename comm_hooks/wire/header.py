"""What stands before a payload, so that nobody decodes what was not meant."""

from abc import ABC, abstractmethod
from collections.abc import Sequence

import torch
from torch import Tensor

from comm_hooks.wire.stamp import Stamp


class Header(ABC):
    """Written by every rank before its payload, and judged alike by all ranks.

    On the CPU at once.  What an accelerator holds is copied while it goes on computing and judged
    at the next opportunity; until then what does not fit makes the result NaN, which every
    optimizer here skips.

    Args:
        ranks: those that take part, as users count them, in their order.
        place: of this rank among them.
    """

    def __init__(self, ranks: Sequence[int], place: int) -> None:
        self._ranks = ranks
        self._place = place
        self._pending: list[tuple[Tensor, torch.Event, Stamp, str]] = []

    @property
    @abstractmethod
    def nbytes(self) -> int:
        """The size of the header."""

    @abstractmethod
    def write_(self, payloads: Tensor, stamp: Stamp, health: Tensor) -> None:
        """Write the headers of payloads (M, nbytes), uint8, whose bodies are written already.

        Args:
            payloads: of this rank; nbytes a multiple of 8.
            stamp: of this rank.
            health: float32 scalar on the payloads' device: 0 where the rank's vector is finite,
                else NaN.
        """

    def check(self, payloads: Tensor, stamp: Stamp, senders: str = "rank") -> Tensor:
        """Check that payloads belong together; return 0 if all vectors were finite, else NaN.

        Args:
            payloads: as they have arrived: (N, nbytes), uint8, in rank order, or (1, nbytes) that
                were summed.
            stamp: of this rank.
            senders: what an error calls the ranks.

        Raises:
            PayloadError: on all ranks alike, if the payloads do not belong together; on its
                receivers, if one is damaged.
        """
        self.settle()
        found, health = self._read(payloads)
        if payloads.device.type == "cpu":
            self._judge(found, stamp, senders)
            return health
        self._look_later(found, stamp, senders)
        return torch.where(self._fits(found, stamp), health, torch.nan)

    def settle(self) -> None:
        """Raise ``PayloadError`` for what has been found since.  Waits for what is pending."""
        pending, self._pending = self._pending, []
        for found, event, stamp, senders in pending:
            event.synchronize()
            self._judge(found, stamp, senders)

    @abstractmethod
    def _read(self, payloads: Tensor) -> tuple[Tensor, Tensor]:
        """Return what is to be judged, a small tensor, and the health that is claimed."""

    @abstractmethod
    def _judge(self, found: Tensor, stamp: Stamp, senders: str) -> None:
        """Raise ``PayloadError`` if what was found, now on the CPU, does not fit."""

    @abstractmethod
    def _fits(self, found: Tensor, stamp: Stamp) -> Tensor:
        """Return the same as a boolean scalar, without waiting for an accelerator."""

    def _look_later(self, found: Tensor, stamp: Stamp, senders: str) -> None:
        copy = torch.empty(found.shape, dtype=found.dtype, pin_memory=True)
        copy.copy_(found, non_blocking=True)
        event = torch.Event(found.device)
        event.record()
        self._pending.append((copy, event, stamp, senders))
