"""A compressor that drops nothing: the control in comparisons, and used for small parameters."""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from comm_hooks.compressors.base import Compressor, write
from comm_hooks.kernels.residual import Residual
from comm_hooks.randomness import Draw
from comm_hooks.requirements import require_choice
from comm_hooks.wire.sections import join, word_aligned


@dataclass(frozen=True)
class Identity(Compressor):
    """Sends every element, as float32 or rounded to bfloat16.

    With ``collective="all_reduce"`` this is plain averaging through the code path of all
    compressors: the control in comparisons.

    Args:
        bits: 32 (float32) or 16 (bfloat16; such payloads cannot be summed on the wire).

    Shapes: vector (d,) -> payload (d,) float32, or uint8 of 2 d bytes.

    Example::

        >>> Identity().compress(torch.tensor([1.0, 2.0]), key=0)
        tensor([1., 2.])
    """

    bits: int = 32

    def __post_init__(self) -> None:
        require_choice(self, "bits", self.bits, (16, 32))

    @property
    def linear(self) -> bool:  # type: ignore[override]  # a constant of most classes
        return self.bits == 32

    @property
    def unbiased(self) -> bool:
        return self.bits == 32

    contractive = True

    def payload_nbytes(self, numel: int, *, world_size: int = 1) -> int:
        return word_aligned(numel * self.bits // 8)

    def norm_bound(self, numel: int, *, world_size: int = 1) -> float:
        return 1.0 if self.linear else math.inf

    @property
    def _dtype(self) -> torch.dtype:
        return torch.float32 if self.linear else torch.bfloat16

    def encode(self, rows: Tensor, draw: Draw) -> Tensor:
        if self.linear:
            return rows
        return join(rows.to(self._dtype))

    def extract(self, rows: Tensor, draw: Draw, residual: Residual | None = None) -> Tensor:
        if not self.linear:
            return super().extract(rows, draw, residual)
        if residual:
            residual.add_to(rows)
        payloads = rows.clone()
        rows.zero_()
        return payloads

    def decode(
        self, out: Tensor, payloads: Tensor, draw: Draw, *, alpha: float = 1.0, add: bool = False
    ) -> None:
        write(out, payloads.view(self._dtype)[:, : out.shape[1]].float(), alpha, add)


@dataclass(frozen=True)
class Half(Identity):
    """Sends every element, rounded to float16; for tensors of that dtype.

    Example::

        >>> Half().payload_nbytes(1000)
        2000
    """

    bits: int = 16

    _dtype = torch.float16


def exact(dtype: torch.dtype) -> Identity:
    """Return the compressor that sends tensors of a dtype exactly, in as few bytes as it can.

    Example::

        >>> exact(torch.bfloat16), exact(torch.float32)
        (Identity(bits=16), Identity(bits=32))
    """
    return {torch.bfloat16: Identity(16), torch.float16: Half()}.get(dtype, Identity())
