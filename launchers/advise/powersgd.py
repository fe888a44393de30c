"""What a step of PyTorch's PowerSGD hook computes and sends, without its process group."""

import math
from collections.abc import Sequence

import torch
from torch import Tensor


class PowerSGDStep:
    """The arithmetic of ``powerSGD_hook`` on one bucket, and the sizes of its three all-reduces.

    Vogels et al., NeurIPS 2019.  For every gradient M (n, m) of two dimensions or more, after the
    others were averaged as they are: average P = M Q, orthogonalize it, average Q = M^T P, and keep
    M - P Q^T for the next step.  As in PyTorch a matrix that two factors would not halve is not
    compressed.

    Args:
        gradients: of a model; the first dimension is n, all others together are m.
        rank: columns of P and Q.
    """

    def __init__(self, gradients: Sequence[Tensor], rank: int) -> None:
        by_shape: dict[tuple[int, int], list[Tensor]] = {}
        uncompressed = 0
        for gradient in gradients:
            rows = gradient.shape[0] if gradient.dim() else 1
            columns = gradient.numel() // rows
            if gradient.dim() < 2 or 2 * (rows + columns) * rank >= gradient.numel():
                uncompressed += gradient.numel()
            else:
                by_shape.setdefault((rows, columns), []).append(gradient.view(rows, columns))
        self._batches = [torch.stack(matrices) for matrices in by_shape.values()]
        self._factors = [
            torch.randn(*b.shape[::2], min(rank, *b.shape[1:]), device=b.device)
            for b in self._batches
        ]
        left = sum(math.prod(b.shape[:2]) * q.shape[-1] for b, q in self._pairs())
        right = sum(factor.numel() for factor in self._factors)
        self.payload_numels = (uncompressed, left, right)

    def run(self) -> None:
        """Do the arithmetic of a step."""
        for matrices, right in self._pairs():
            left = torch.linalg.qr(matrices @ right).Q
            torch.sub(matrices, left @ (matrices.mT @ left).mT)

    def _pairs(self) -> list[tuple[Tensor, Tensor]]:
        return list(zip(self._batches, self._factors, strict=True))
