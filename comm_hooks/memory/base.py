"""What a rank remembers from one round to the next."""

from abc import ABC, abstractmethod
from collections.abc import Mapping

import torch

from comm_hooks.layout import Rows


class Memory(ABC):
    """Adds something to a rank's vector before it is compressed, and learns what was not sent.

    A memory is tied to parameter names: a row of :class:`Rows` may be found in another matrix, at
    another place, in the next round.
    """

    @abstractmethod
    def fresh(self) -> "Memory":
        """Return an empty memory with the same settings, for another place in the exchange."""

    @abstractmethod
    def settings(self) -> dict[str, object]:
        """Return what must be equal on all ranks."""

    @abstractmethod
    def compensate(self, rows: Rows, active: torch.Tensor, scale: float) -> None:
        """Add what is remembered to ``rows.matrix``, in place, where ``active``.

        Args:
            rows: this round's vectors.
            active: booleans (n, 1); a row without any gradient is left alone, since DDP discards
                what is returned for a parameter that no rank used.
            scale: the factor by which gradients are scaled at present (loss scaling).
        """

    @abstractmethod
    def retain(self, rows: Rows, accept: torch.Tensor, scale: float) -> None:
        """Remember ``rows.matrix``, what was left of the vectors after sending, where ``accept``.

        Where ``accept`` (n, 1) is false the row's memory stays as it was.
        """

    @abstractmethod
    def norm(self) -> float:
        """Return the Euclidean norm of all that is remembered, in unscaled gradient units."""

    @abstractmethod
    def state_dict(self) -> dict[str, torch.Tensor]:
        """Return one tensor per parameter name."""

    @abstractmethod
    def load_state_dict(self, state: Mapping[str, torch.Tensor]) -> None:
        """Replace all that is remembered.

        Raises:
            ValueError: if a tensor's dtype is not what this memory stores; nothing is changed.
        """
