"""The interface of memories, which keep residuals from one round to the next."""

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor

from comm_hooks.kernels.residual import Residual
from comm_hooks.memory.rows import NamedRows, Rows
from comm_hooks.randomness import Keys


class Memory(ABC):
    """Adds residuals to a rank's vectors before they are compressed, and keeps the new residuals.

    A memory is tied to parameter names: a row of :class:`Rows` may be in another matrix, at another
    place, in the next round.

    ``sends_changes``: a round returns the mean of changes since earlier rounds, which the receiver
    must add up, not the mean of vectors.

    ``linear``: except for roundings of float32, the residuals are a linear function of the vectors
    of all rounds and of the payloads.
    """

    sends_changes: ClassVar[bool] = False
    source_collective: ClassVar[str] = "auto"
    """What ``collective="auto"`` means: another one would be another algorithm."""
    linear: bool = True
    # The change of the residual of the mean over ranks per change of the stored vectors.
    _owed: ClassVar[float] = 1.0
    _dtype = torch.float32

    def __init__(self, *prefixes: str) -> None:
        """Make a store of rows by parameter name for each prefix; the last keeps the residuals."""
        self._stores = {prefix: NamedRows(self._empty) for prefix in prefixes or ("",)}
        self._last = [*self._stores][-1]
        self._kept = self._stores[self._last]

    @abstractmethod
    def fresh(self) -> "Memory":
        """Return an empty memory with the same settings, for another exchange or client."""

    def __deepcopy__(self, memo: dict[int, Any]) -> "Memory":
        """Return a memory with copies of all rows, on the same devices."""
        duplicate = memo[id(self)] = self.fresh()
        for prefix, store in self._stores.items():
            duplicate._stores[prefix].copy_(store)
        return duplicate

    @abstractmethod
    def for_server(self) -> "Memory":
        """Return an empty memory for the owner of a shard, which compresses the mean again.

        It has one row per parameter: the residual.
        """

    @abstractmethod
    def __repr__(self) -> str:
        """Return text with all settings, which must be equal on all ranks."""

    def active(self, norms: Tensor) -> Tensor:
        """Return whether each row takes part in a round, booleans (n, 1), given its norm.

        A row of zeros does not, since DDP discards the result for a parameter that no rank used.
        """
        return norms != 0

    @abstractmethod
    def compensate(self, rows: Rows, active: Tensor, scale: float) -> Residual | None:
        """Add residuals to ``rows.matrix``, in place, where ``active``.

        Args:
            rows: this round's vectors.
            active: the result of :meth:`active`.
            scale: the loss scale by which the vectors are multiplied.

        Returns:
            The residual that the compressor still has to add to the rows; None if there is none.
        """

    @abstractmethod
    def retain(self, rows: Rows, accept: Tensor, scale: float, key: int) -> None:
        """Store the new residuals, which encoding has left in ``rows.matrix``.

        Where ``accept`` (n, 1) is false the stored row does not change.  ``key`` belongs to this
        rank and round, for memories that draw random numbers.
        """

    def give_back(self, rows: Rows, excess: Tensor, scale: float) -> None:
        """Add ``excess``, the part of a mean that its dtype cannot hold, to the residuals.

        Call it after :meth:`retain`, on all ranks with the same excess, or on one rank with the
        excess times the number of ranks: the residual of the mean over ranks grows by the excess.

        Args:
            rows: the rows of the round.
            excess: (n, numel), float32, with the scale of the vectors.
            scale: see :meth:`compensate`.
        """
        stored = self._kept.matrix(rows)
        vectors = self._decode(stored, rows.matrix.shape[1]).add_(excess, alpha=self._owed / scale)
        stored.copy_(self._encode(vectors, (0,) * len(vectors)))

    def vector(self, name: str) -> Tensor | None:
        """Return the unscaled residual of a parameter, (numel,), float32; None if there is none.

        It may share memory with the stored row: do not write to it.
        """
        found = self._kept.get(name)
        if found is None:
            return None
        row, numel = found
        return self._decode(row[None], numel)[0]

    def norm(self) -> float:
        """Return the Euclidean norm of all residuals, in unscaled gradient units."""
        norms = (self._decode(row[None], numel).norm() for _, row, numel in self._kept.items())
        return math.sqrt(sum(float(norm) ** 2 for norm in norms))

    def state_dict(self) -> dict[str, Tensor]:
        """Return copies of the stored rows, on the CPU, by prefix and parameter name."""
        return {
            prefix + name: row
            for prefix, store in self._stores.items()
            for name, row in store.state_dict().items()
        }

    def parameters_in(self, state: Mapping[str, Tensor]) -> set[str]:
        """Return the names of the parameters that have rows in a saved state."""
        return {name for prefix in self._stores for name in _under(prefix, state)}

    def check(self, state: Mapping[str, Tensor], numels: Mapping[str, int] | None = None) -> None:
        """Raise ``ValueError`` unless a memory with these settings can have saved a state.

        Args:
            state: the object to check, of any kind.
            numels: the number of elements of each parameter; None if it is not known.
        """
        if not isinstance(state, Mapping):
            raise ValueError(
                f"the saved state of {self} must be a dictionary of vectors, got "
                f"{type(state).__name__}: load what state_dict() returned"
            )
        known = (numels or {}).items()
        widths = {p + name: self._width(numel) for p in self._stores for name, numel in known}
        for name, row in state.items():
            if not isinstance(name, str) or not _is_vector(row):
                raise ValueError(
                    f"the saved state of {self} must have a vector under each parameter's name, "
                    f"got {_kind(row)} under {_kind(name)}: load what state_dict() returned"
                )
            if row.dtype != self._dtype:
                raise ValueError(
                    f"the saved residual of {name!r} is {row.dtype}, but {self} stores "
                    f"{self._dtype}: load it into a memory with the settings it was saved with"
                )
            if numels is not None and len(row) != widths.get(name):
                raise ValueError(
                    f"the saved residual of {name!r} has {len(row)} elements, but the parameter "
                    f"needs {widths.get(name, 'to be known')}: load a state of this model"
                )

    def load_state_dict(
        self, state: Mapping[str, Tensor], numels: Mapping[str, int] | None = None
    ) -> None:
        """Replace all residuals by those of a saved state.

        Args:
            state: the result of :meth:`state_dict`.
            numels: the number of elements of each parameter in the state.  Vectors of another
                length, or all without ``numels``, count in :meth:`norm` from their next round on.

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
        of_shards: Mapping[str, Tensor],
        numels: Mapping[str, int],
        *,
        scale: float = 1.0,
    ) -> dict[str, Tensor]:
        """Return the state with which every rank continues a run of another number of ranks.

        The residual of the mean over ranks stays the same on any number of ranks, times ``scale``.

        Args:
            states: the states that all ranks of the earlier run saved, in rank order.
            of_shards: the residuals of the owners of shards, (numel,) float32 per parameter, which
                are residuals of the mean itself.
            numels: the number of elements of each parameter.
            scale: a factor of the residual of the mean.

        Raises:
            ValueError: as :meth:`check`.
        """
        total: dict[str, Tensor] = {}
        for state in states:
            for name, row in self.vectors(state, numels).items():
                total[name] = total[name] + row if name in total else row
        mean = {name: row * (scale / len(states)) for name, row in total.items()}
        for name, row in of_shards.items():
            stored = self._last + name
            rest = self._owed * scale * row
            mean[stored] = mean[stored] + rest if stored in mean else rest
        return self.stored(mean)

    def vectors(self, state: Mapping[str, Tensor], numels: Mapping[str, int]) -> dict[str, Tensor]:
        """Return the rows of a saved state as vectors (numel,), float32.

        Raises:
            ValueError: as :meth:`check`.
        """
        self.check(state, numels)
        return {
            prefix + name: self._decode(row[None], numels[name])[0]
            for prefix in self._stores
            for name, row in _under(prefix, state).items()
        }

    def stored(self, vectors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Convert vectors (numel,) to the layout of saved states; inverse of :meth:`vectors`."""
        return {name: self._encode(vector[None], (0,))[0] for name, vector in vectors.items()}

    def _empty(self, matrix: Tensor) -> Tensor:
        """Return the initial stored rows, encoded zeros, for vectors like ``matrix`` (n, numel)."""
        return self._encode(torch.zeros_like(matrix), (0,) * len(matrix))

    def _width(self, numel: int) -> int:
        """Return the number of elements of the stored row for a vector of ``numel`` elements."""
        return numel

    def _encode(self, vectors: Tensor, keys: Keys) -> Tensor:
        """Return vectors (n, numel), float32, as rows to store; ``keys``: for random rounding."""
        return vectors.to(self._dtype)

    def _decode(self, stored: Tensor, numel: int) -> Tensor:
        """Return stored rows as vectors (n, numel), float32, which may share their memory."""
        return stored.float()


def _under(prefix: str, state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the rows of a saved state with a prefix, by parameter name without it."""
    return {n.removeprefix(prefix): row for n, row in state.items() if n.startswith(prefix)}


def _is_vector(value: object) -> bool:
    if not isinstance(value, Tensor) or value.layout is not torch.strided:
        return False
    return value.dim() == 1 and not value.is_meta


def _kind(value: object) -> str:
    if isinstance(value, str):
        return repr(value)
    if isinstance(value, Tensor):
        return f"a tensor of shape {tuple(value.shape)} on {value.device}"
    return type(value).__name__
