"""Error-feedback residuals still to be added to vectors before they are compressed."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, eq=False)
class Residual:
    """Error-feedback residuals of a matrix's rows, to be added when the matrix is read next.

    Compressors that read a matrix in blocks add the residual to each block, which saves a pass.

    Attributes:
        vectors: (n, numel), float32 or bfloat16.
        factor: the factor of the vectors: one number, or float32 (n, 1).
    """

    vectors: Tensor
    factor: float | Tensor

    def add_to(self, rows: Tensor) -> None:
        """Add ``factor * vectors`` to ``rows`` (n, numel), float32, in place."""
        if isinstance(self.factor, Tensor):
            rows.addcmul_(self.vectors.float(), self.factor)
        else:
            # Half the time of a multiplication by a column.
            rows.add_(self.vectors, alpha=self.factor)

    def of(self, rows: slice, columns: slice = slice(None)) -> Residual:
        """Return the residual of these rows and columns of the matrix."""
        factor = self.factor[rows] if isinstance(self.factor, Tensor) else self.factor
        return Residual(self.vectors[rows, columns], factor)

    def in_blocks(self, size: int) -> Residual:
        """Return the residual with a row per block of ``size`` elements, a divisor of numel."""
        blocks = self.vectors.reshape(-1, size)
        factor = self.factor
        if isinstance(factor, Tensor):
            factor = factor.repeat_interleave(len(blocks) // len(factor), dim=0)
        return Residual(blocks, factor)

    def factors(self) -> Tensor:
        """Return the factor of each row, (n,), float32, even if all rows share one number."""
        if isinstance(self.factor, Tensor):
            return self.factor.flatten()
        return self.vectors.new_full((len(self.vectors),), self.factor, dtype=torch.float32)
