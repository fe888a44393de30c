"""Matrices with a named vector in each row, and a store that finds such rows by name."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from weakref import WeakKeyDictionary, WeakValueDictionary

import torch
from torch import Tensor


@dataclass(eq=False)
class Rows:
    """Equally long vectors as a float32 matrix (n, numel), with the parameter name of each row."""

    names: tuple[str, ...]
    matrix: Tensor


class NamedRows:
    """Stores one vector per parameter as a row of a matrix, found by name.

    A round touches one matrix per group of parameters.  When the grouping changes (DDP has rebuilt
    its buckets) the rows move to the new matrices by name.

    Args:
        empty: returns the initial stored matrix for a matrix (n, numel) of vectors; its rows may
            have another dtype and width.
    """

    def __init__(self, empty: Callable[[Tensor], Tensor]) -> None:
        self._empty = empty
        self._matrices: WeakKeyDictionary[Rows, Tensor] = WeakKeyDictionary()
        self._owners: WeakValueDictionary[str, Rows] = WeakValueDictionary()
        self._rows: dict[str, Tensor] = {}
        self._numels: dict[str, int] = {}

    def matrix(self, rows: Rows) -> Tensor:
        """Return the matrix of stored rows for the parameters of ``rows``, to be changed in place.

        Raises:
            ValueError: if a stored row belongs to a parameter of another size.
        """
        if rows in self._matrices:
            return self._matrices[rows]
        matrix = self._empty(rows.matrix)
        for row, name in zip(matrix, rows.names, strict=True):
            known = self._rows.get(name)
            if known is not None and known.shape != row.shape:
                raise ValueError(
                    f"the residual of {name!r} has {known.numel()} elements, but the parameter "
                    f"needs {row.numel()}: load a state of this model"
                )
            if known is not None:
                row.copy_(known)
            if name in self._owners:
                # If that group comes back, it must fetch its rows again.
                self._matrices.pop(self._owners[name], None)
            self._owners[name] = rows
            self._rows[name] = row
            self._numels[name] = rows.matrix.shape[1]
        self._matrices[rows] = matrix
        return matrix

    def get(self, name: str) -> tuple[Tensor, int] | None:
        """Return the stored row and the number of elements of a parameter; None if unknown."""
        if name not in self._numels:
            return None
        return self._rows[name], self._numels[name]

    def items(self) -> Iterator[tuple[str, Tensor, int]]:
        """Yield (name, stored row, number of elements) of each parameter with known size."""
        return ((name, self._rows[name], numel) for name, numel in self._numels.items())

    def state_dict(self) -> dict[str, Tensor]:
        """Return a copy of each stored row, on the CPU, by parameter name."""
        return {name: row.detach().cpu().clone() for name, row in self._rows.items()}

    def load_state_dict(self, state: Mapping[str, Tensor], numels: Mapping[str, int]) -> None:
        """Replace all rows; they move into matrices in the next round of their parameters.

        Args:
            state: the rows by name.
            numels: the number of elements of each row's vector, as far as it is known.
        """
        # A row of another size is refused in the next round of its parameter.
        known = {
            name: numel
            for name, numel in self._numels.items()
            if name in state and state[name].shape == self._rows[name].shape
        }
        self._numels = {**known, **numels}
        self._rows = {name: row.clone() for name, row in state.items()}
        self._matrices.clear()

    def copy_(self, other: "NamedRows") -> None:
        """Replace all rows by copies of another store's rows, on the same devices."""
        self.load_state_dict(other._rows, other._numels)


def replace_(old: Tensor, new: Tensor, accept: Tensor) -> None:
    """Copy to ``old`` the rows of ``new`` for which ``accept``, booleans (n, 1), is true."""
    if accept.device.type == "cpu" and accept.all():
        old.copy_(new)
    else:
        # Does not ask the device whether all rows are accepted: that would wait for it.
        old.copy_(torch.where(accept, new, old))
