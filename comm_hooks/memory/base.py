"""What a rank remembers from one round to the next."""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import torch

from comm_hooks.kernels.residual import Residual
from comm_hooks.memory.rows import Rows


class Memory(ABC):
    """Adds something to a rank's vector before it is compressed, and learns what was not sent.

    A memory is tied to parameter names: a row of :class:`Rows` may be found in another matrix, at
    another place, in the next round.

    ``sends_changes``: a round returns the mean of changes that the receiver must add up, not a mean
    of vectors.

    ``linear``: what it adds is, but for roundings of float32, a linear function of the vectors that
    it has seen and of those that were sent of them.
    """

    sends_changes: ClassVar[bool] = False
    linear: bool = True

    @abstractmethod
    def fresh(self) -> "Memory":
        """Return an empty memory with the same settings: another client's."""

    def __deepcopy__(self, memo: dict[int, Any]) -> "Memory":
        """Return a memory of the same, on the CPU until a round takes it where it is needed."""
        duplicate = memo[id(self)] = self.fresh()
        duplicate.load_state_dict(self.state_dict())
        return duplicate

    @abstractmethod
    def for_server(self) -> "Remainder":
        """Return an empty memory for who averages what others sent and compresses it again."""

    @abstractmethod
    def __repr__(self) -> str:
        """Return all settings, which must be equal on all ranks."""

    def active(self, norms: torch.Tensor) -> torch.Tensor:
        """Return which rows take part in a round, booleans (n, 1), given the norms of the vectors.

        A row without any gradient is left alone, since DDP discards what is returned for a
        parameter that no rank used.
        """
        return norms != 0

    @abstractmethod
    def compensate(self, rows: Rows, active: torch.Tensor, scale: float) -> Residual | None:
        """Add what is remembered to ``rows.matrix``, in place, where ``active``.

        Args:
            rows: this round's vectors.
            active: from :meth:`active`.
            scale: the factor by which gradients are scaled at present (loss scaling).

        Returns:
            What is still to be added, by who reads the vectors next; None if all has been.
        """

    @abstractmethod
    def retain(self, rows: Rows, accept: torch.Tensor, scale: float, key: int) -> None:
        """Remember ``rows.matrix``, what was left of the vectors after sending, where ``accept``.

        Where ``accept`` (n, 1) is false the row's memory stays as it was.  ``key`` is this rank's
        and round's own, for memories that draw.
        """

    @abstractmethod
    def give_back(self, rows: Rows, rest: torch.Tensor, scale: float) -> None:
        """Remember ``rest``, a part of the mean that arrived and could not be delivered.

        Called on all ranks alike, after :meth:`retain`: what the mean over ranks still has to
        receive is then as much more.  (Or on one rank alone, with as many times as much.)

        Args:
            rows: those of the round.
            rest: (n, numel), float32, scaled as the vectors were.
            scale: see :meth:`compensate`.
        """

    @abstractmethod
    def norm(self) -> float:
        """Return the Euclidean norm of all that is remembered, in unscaled gradient units."""

    @abstractmethod
    def state_dict(self) -> dict[str, torch.Tensor]:
        """Return what to save, as a flat dictionary of tensors."""

    def parameters_in(self, state: Mapping[str, torch.Tensor]) -> set[str]:
        """Return the names of the parameters that a state is about."""
        return set(state)

    @abstractmethod
    def check(
        self, state: Mapping[str, torch.Tensor], numels: Mapping[str, int] | None = None
    ) -> None:
        """Raise ``ValueError`` unless a state can be what a memory with these settings has saved.

        Args:
            state: whatever it is.
            numels: the number of elements of each parameter, if that is known.
        """

    @abstractmethod
    def load_state_dict(self, state: Mapping[str, torch.Tensor]) -> None:
        """Replace all that is remembered.

        Raises:
            ValueError: as :meth:`check`; nothing is changed.
        """

    @abstractmethod
    def merge(
        self,
        states: Sequence[Mapping[str, torch.Tensor]],
        unsent: Mapping[str, torch.Tensor],
        numels: Mapping[str, int],
    ) -> dict[str, torch.Tensor]:
        """Return a state for every rank of a run that continues one with other ranks.

        What the mean over ranks still has to receive stays the same, however many ranks there are.

        Args:
            states: of all ranks of the run that was, in rank order.
            unsent: what its servers had not passed on, (numel,) float32 per parameter: a part of
                the mean itself.
            numels: the number of elements of each parameter.

        Raises:
            ValueError: as :meth:`check`.
        """


class Remainder(Memory):
    """A memory of what is still to be sent, and of nothing else: what a server can have."""

    @abstractmethod
    def vectors(
        self, state: Mapping[str, torch.Tensor], numels: Mapping[str, int]
    ) -> dict[str, torch.Tensor]:
        """Return what a state remembers as vectors (numel,), float32.

        Raises:
            ValueError: as :meth:`check`.
        """


def mean_rows(states: Sequence[Mapping[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    """Return the mean over ranks of each row; a rank without a row has zeros there."""
    total: dict[str, torch.Tensor] = {}
    for state in states:
        for name, row in state.items():
            total[name] = total[name] + row if name in total else row
    return {name: row / len(states) for name, row in total.items()}


def add_rows(
    rows: Mapping[str, torch.Tensor], others: Mapping[str, torch.Tensor], alpha: float = 1.0
) -> dict[str, torch.Tensor]:
    """Return rows + alpha others, where a missing row is zero."""
    result = dict(rows)
    for name, other in others.items():
        result[name] = result[name] + alpha * other if name in result else alpha * other
    return result
