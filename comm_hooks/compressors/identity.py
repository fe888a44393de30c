"""No compression: the control, and the way small parameters travel."""

import math
from dataclasses import dataclass

import torch

from comm_hooks.compressors.base import Compressor, word_aligned, write
from comm_hooks.randomness import Keys
from comm_hooks.requirements import require_choice


@dataclass(frozen=True)
class Identity(Compressor):
    """Sends every element, as float32 or rounded to bfloat16.

    With ``collective="all_reduce"`` this is plain averaging through the same code as everything
    else, which makes it the control to compare with.

    Args:
        bits: 32 (float32) or 16 (bfloat16, whose payloads cannot be summed on the wire).

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

    def _compress(self, rows: torch.Tensor, keys: Keys, rank: int, world_size: int) -> torch.Tensor:
        if self.linear:
            return rows
        payload = torch.zeros(
            len(keys), self.payload_nbytes(rows.shape[1]), dtype=torch.uint8, device=rows.device
        )
        payload[:, : 2 * rows.shape[1]] = rows.bfloat16().view(torch.uint8)
        return payload

    def _extract(self, rows: torch.Tensor, keys: Keys, rank: int, world_size: int) -> torch.Tensor:
        if not self.linear:
            return super()._extract(rows, keys, rank, world_size)
        payloads = rows.clone()
        rows.zero_()
        return payloads

    def _decode(
        self,
        out: torch.Tensor,
        payloads: torch.Tensor,
        keys: Keys,
        rank: int,
        world_size: int,
        alpha: float,
        add: bool,
    ) -> None:
        dtype = torch.float32 if self.linear else torch.bfloat16
        write(out, payloads.view(dtype)[:, : out.shape[1]].float(), alpha, add)
