"""Error feedback: what was not sent this time is added next time."""

import math
from collections.abc import Mapping
from weakref import WeakKeyDictionary, WeakValueDictionary

import torch

from comm_hooks.compressors.base import require_choice
from comm_hooks.compressors.quantize import Quantize
from comm_hooks.layout import Rows
from comm_hooks.memory.base import Memory


class ErrorFeedback(Memory):
    """Keeps the compression error of every parameter and adds it to the next vector.

    Seide et al., Interspeech 2014; Karimireddy et al., ICML 2019.  Per round and parameter:

    1. a = g + e;
    2. send C(a);
    3. e = a - D(C(a)), unless some rank's vector was not finite, or g is all zero: then e stays.

    Summed over rounds, the true gradients equal what was sent plus e: nothing is lost.

    Args:
        bits: how the residual is stored: 32 (float32), 16 (bfloat16) or 4 (min-max codes in blocks
            of 256, 0.53 bytes per element).  What rounding drops in steps 1 to 3 is lost: 16 keeps
            8 bits of every element, 4 keeps a fifteenth of its block's range.

    Memory: 4, 2 or 0.53 bytes per compressed parameter and rank.  Each rank's residual is its own:
    save and load it on every rank.
    Not supported: compressors that are not contractive (sketches, unbiased RandomK, PermK), for
    which the residual grows without bound.

    Example::

        >>> ErrorFeedback(bits=16)
        ErrorFeedback(bits=16)
    """

    def __init__(self, bits: int = 32) -> None:
        require_choice(self, "bits", bits, (4, 16, 32))
        self.bits = bits
        self._codec = Quantize(bits=4) if bits == 4 else None
        self._dtype = {4: torch.uint8, 16: torch.bfloat16, 32: torch.float32}[bits]
        # A residual lives as a row of its group's matrix, so that a round touches one tensor per
        # group; _residuals finds it by name when the grouping changes, and _owners the group that
        # it leaves.
        self._matrices: WeakKeyDictionary[Rows, torch.Tensor] = WeakKeyDictionary()
        self._owners: WeakValueDictionary[str, Rows] = WeakValueDictionary()
        self._residuals: dict[str, torch.Tensor] = {}
        self._numels: dict[str, int] = {}

    def __repr__(self) -> str:
        return f"ErrorFeedback(bits={self.bits})"

    def fresh(self) -> "ErrorFeedback":
        return ErrorFeedback(self.bits)

    def settings(self) -> dict[str, object]:
        return {"name": "error_feedback", "bits": self.bits}

    def compensate(self, rows: Rows, active: torch.Tensor, scale: float) -> None:
        residual = self._decode(self._matrix(rows), rows.matrix.shape[1])
        rows.matrix.addcmul_(residual, active.to(rows.matrix.dtype), value=scale)

    def retain(self, rows: Rows, accept: torch.Tensor, scale: float) -> None:
        matrix = self._matrix(rows)
        left = rows.matrix if scale == 1 else rows.matrix / scale
        if accept.device.type == "cpu" and accept.all():
            matrix.copy_(self._encode(left))
        else:
            # Without asking the device whether all rows are accepted, which would wait for it.
            matrix.copy_(torch.where(accept, self._encode(left), matrix))

    def norm(self) -> float:
        norms = [
            torch.linalg.vector_norm(self._decode(row[None], self._numels[name]))
            for name, row in self._residuals.items()
            if name in self._numels
        ]
        return math.sqrt(sum(float(norm) ** 2 for norm in norms))

    def state_dict(self) -> dict[str, torch.Tensor]:
        return {name: row.detach().cpu().clone() for name, row in self._residuals.items()}

    def load_state_dict(self, state: Mapping[str, torch.Tensor]) -> None:
        for name, row in state.items():
            if row.dtype != self._dtype:
                raise ValueError(
                    f"the saved residual of {name!r} is {row.dtype}, but {self} stores "
                    f"{self._dtype}: load it into a memory with the bits it was saved with"
                )
        self._residuals = {name: row.clone() for name, row in state.items()}
        self._matrices.clear()

    def _matrix(self, rows: Rows) -> torch.Tensor:
        """Return the residuals of ``rows``, moved here by name if they were elsewhere."""
        if rows in self._matrices:
            return self._matrices[rows]
        matrix = self._encode(torch.zeros_like(rows.matrix))
        for row, name in zip(matrix, rows.names, strict=True):
            known = self._residuals.get(name)
            if known is not None and known.shape != row.shape:
                raise ValueError(
                    f"the residual of {name!r} has {known.numel()} elements, but the parameter "
                    f"needs {row.numel()}: the state belongs to another model"
                )
            if known is not None:
                row.copy_(known)
            if name in self._owners:
                # Should that group come back, it must fetch its residuals anew.
                self._matrices.pop(self._owners[name], None)
            self._owners[name] = rows
            self._residuals[name] = row
            self._numels[name] = rows.matrix.shape[1]
        self._matrices[rows] = matrix
        return matrix

    def _encode(self, matrix: torch.Tensor) -> torch.Tensor:
        if self._codec is None:
            return matrix.to(self._dtype)
        return self._codec._compress(matrix, (0,) * len(matrix), 0, 1)

    def _decode(self, stored: torch.Tensor, numel: int) -> torch.Tensor:
        if self._codec is None:
            return stored.float()
        matrix = torch.empty(len(stored), numel, device=stored.device)
        self._codec._decode(matrix, stored, (0,) * len(stored), 0, 1, 1.0, add=False)
        return matrix
