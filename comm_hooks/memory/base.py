"""What a rank remembers from one round to the next."""

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor

from comm_hooks.kernels.residual import Residual
from comm_hooks.memory.named_rows import NamedRows, check_rows
from comm_hooks.memory.rows import Rows
from comm_hooks.randomness import Keys


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
    # What more of what is stored means for what the mean over ranks still has to receive.
    _owed: ClassVar[float] = 1.0
    _dtype = torch.float32

    def __init__(self, *prefixes: str) -> None:
        """Store a row per parameter under each prefix of its name; of the last one is the norm."""
        self._stores = {prefix: NamedRows(self._empty) for prefix in prefixes or ("",)}
        self._last = [*self._stores][-1]
        self._kept = self._stores[self._last]

    @abstractmethod
    def fresh(self) -> "Memory":
        """Return an empty memory with the same settings: another client's."""

    def __deepcopy__(self, memo: dict[int, Any]) -> "Memory":
        """Return a memory of the same, on the same devices."""
        duplicate = memo[id(self)] = self.fresh()
        for prefix, store in self._stores.items():
            duplicate._stores[prefix].copy_(store)
        return duplicate

    @abstractmethod
    def for_server(self) -> "ResidualMemory":
        """Return an empty memory for the server, which compresses the mean once more."""

    @abstractmethod
    def __repr__(self) -> str:
        """Return all settings, which must be equal on all ranks."""

    def active(self, norms: Tensor) -> Tensor:
        """Return which rows take part in a round, booleans (n, 1), given the norms of the vectors.

        A row without any gradient is left alone, since DDP discards what is returned for a
        parameter that no rank used.
        """
        return norms != 0

    @abstractmethod
    def compensate(self, rows: Rows, active: Tensor, scale: float) -> Residual | None:
        """Add what is remembered to ``rows.matrix``, in place, where ``active``.

        Args:
            rows: this round's vectors.
            active: from :meth:`active`.
            scale: the factor by which gradients are scaled at present (loss scaling).

        Returns:
            What the next reader of the vectors has to add; None if all has been.
        """

    @abstractmethod
    def retain(self, rows: Rows, accept: Tensor, scale: float, key: int) -> None:
        """Remember ``rows.matrix``, what was left of the vectors after sending, where ``accept``.

        Where ``accept`` (n, 1) is false the row's memory stays as it was.  ``key`` is this rank's
        and round's own, for memories that draw.
        """

    def give_back(self, rows: Rows, rest: Tensor, scale: float) -> None:
        """Remember ``rest``, a part of the mean that arrived and could not be delivered.

        Called on all ranks alike, after :meth:`retain`: what the mean over ranks still has to
        receive is then as much more.  (Or on one rank alone, with as many times as much.)

        Args:
            rows: those of the round.
            rest: (n, numel), float32, scaled as the vectors were.
            scale: see :meth:`compensate`.
        """
        stored = self._kept.matrix(rows)
        vectors = self._decode(stored, rows.matrix.shape[1]).add_(rest, alpha=self._owed / scale)
        stored.copy_(self._encode(vectors, (0,) * len(vectors)))

    def vector(self, name: str) -> Tensor | None:
        """Return what is remembered of a parameter, (numel,), float32; None if nothing is.

        In units of a vector whose scale is 1; perhaps the memory's own tensor: only to be read.
        """
        found = self._kept.get(name)
        if found is None:
            return None
        row, numel = found
        return self._decode(row[None], numel)[0]

    def norm(self) -> float:
        """Return the Euclidean norm of all that is remembered, in unscaled gradient units."""
        norms = (self._decode(row[None], numel).norm() for _, row, numel in self._kept.items())
        return math.sqrt(sum(float(norm) ** 2 for norm in norms))

    def state_dict(self) -> dict[str, Tensor]:
        """Return what to save, as a flat dictionary of tensors."""
        return {
            prefix + name: row
            for prefix, store in self._stores.items()
            for name, row in store.state_dict().items()
        }

    def parameters_in(self, state: Mapping[str, Tensor]) -> set[str]:
        """Return the names of the parameters that a state is about."""
        return {name for prefix in self._stores for name in _under(prefix, state)}

    def check(self, state: Mapping[str, Tensor], numels: Mapping[str, int] | None = None) -> None:
        """Raise ``ValueError`` unless a state can be what a memory with these settings has saved.

        Args:
            state: whatever it is.
            numels: the number of elements of each parameter, if that is known.
        """
        widths = None
        if numels is not None:
            widths = {
                p + n: self._width(numel) for p in self._stores for n, numel in numels.items()
            }
        check_rows(state, self._dtype, self, widths)

    def load_state_dict(
        self, state: Mapping[str, Tensor], numels: Mapping[str, int] | None = None
    ) -> None:
        """Replace all that is remembered.

        Args:
            state: what :meth:`state_dict` returned.
            numels: the number of elements of each parameter in it.  Vectors of another length, or
                all of them without it, count in :meth:`norm` from their next round on.

        Raises:
            ValueError: as :meth:`check`; nothing is changed.
        """
        self.check(state)
        for prefix, store in self._stores.items():
            rows = _under(prefix, state)
            fitting = {
                name: numel
                for name, numel in (numels or {}).items()
                if name in rows and len(rows[name]) == self._width(numel)
            }
            store.load_state_dict(rows, fitting)

    def merge(
        self,
        states: Sequence[Mapping[str, Tensor]],
        unsent: Mapping[str, Tensor],
        numels: Mapping[str, int],
        *,
        scale: float = 1.0,
    ) -> dict[str, Tensor]:
        """Return a state for every rank of a run that continues one with other ranks.

        What the mean over ranks still has to receive stays the same, however many ranks there are,
        or is multiplied by ``scale``.

        Args:
            states: of all ranks of the run that was, in rank order.
            unsent: what its servers had not passed on, (numel,) float32 per parameter: a part of
                the mean itself.
            numels: the number of elements of each parameter.
            scale: see above.

        Raises:
            ValueError: as :meth:`check`.
        """
        total: dict[str, Tensor] = {}
        for state in states:
            for name, row in self._vectors(state, numels).items():
                total[name] = total[name] + row if name in total else row
        mean = {name: row * (scale / len(states)) for name, row in total.items()}
        for name, row in unsent.items():
            stored = self._last + name
            rest = self._owed * scale * row
            mean[stored] = mean[stored] + rest if stored in mean else rest
        return {name: self._encode(row[None], (0,))[0] for name, row in mean.items()}

    def _vectors(self, state: Mapping[str, Tensor], numels: Mapping[str, int]) -> dict[str, Tensor]:
        """Return the rows of a state as vectors (numel,), float32, after checking it."""
        self.check(state, numels)
        return {
            prefix + name: self._decode(row[None], numels[name])[0]
            for prefix in self._stores
            for name, row in _under(prefix, state).items()
        }

    def _empty(self, matrix: Tensor) -> Tensor:
        """Return what is stored for the vectors (n, numel) of a group at first."""
        return self._encode(torch.zeros_like(matrix), (0,) * len(matrix))

    def _width(self, numel: int) -> int:
        """Return the elements of what is stored for ``numel``."""
        return numel

    def _encode(self, vectors: Tensor, keys: Keys) -> Tensor:
        """Return what is stored for vectors (n, numel), float32, with keys to draw from."""
        return vectors.to(self._dtype)

    def _decode(self, stored: Tensor, numel: int) -> Tensor:
        """Return the vectors (n, numel), float32, that rows stand for; perhaps the same memory."""
        return stored.float()


class ResidualMemory(Memory):
    """A memory of what is still to be sent, and of nothing else: what a server can have."""

    def vectors(self, state: Mapping[str, Tensor], numels: Mapping[str, int]) -> dict[str, Tensor]:
        """Return what a state remembers as vectors (numel,), float32.

        Raises:
            ValueError: as :meth:`check`.
        """
        return self._vectors(state, numels)


def _under(prefix: str, state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the rows under a prefix, by parameter name."""
    return {n.removeprefix(prefix): row for n, row in state.items() if n.startswith(prefix)}
