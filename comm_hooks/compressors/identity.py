"""No compression: the control, and the way small parameters travel."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from comm_hooks.compressors.base import Compressor, write


@dataclass(frozen=True)
class Identity(Compressor):
    """Sends every element as float32.

    With ``collective="all_reduce"`` this is plain averaging through the same code as everything
    else, which makes it the control to compare with.

    Example::

        >>> Identity().compress(torch.tensor([1.0, 2.0]), key=0)
        tensor([1., 2.])
    """

    linear = True
    unbiased = True
    contractive = True

    def payload_nbytes(self, numel: int, *, world_size: int = 1) -> int:
        return 4 * numel

    def norm_bound(self, numel: int, *, world_size: int = 1) -> float:
        return 1.0

    def _compress(
        self, rows: torch.Tensor, keys: Sequence[int], rank: int, world_size: int
    ) -> torch.Tensor:
        return rows

    def _decode(
        self,
        out: torch.Tensor,
        payloads: torch.Tensor,
        keys: Sequence[int],
        rank: int,
        world_size: int,
        alpha: float,
        add: bool,
    ) -> None:
        write(out, payloads.view(torch.float32), alpha, add)
