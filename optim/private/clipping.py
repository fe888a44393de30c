"""Clipping samples' gradients and adding them up."""

import math
import warnings
from collections.abc import Sequence

import torch

from comm_hooks.optim.private.clipped_sum import ClippedGradients, ClippedSum, PublicTransform
from comm_hooks.optim.private.settled import Settled
from comm_hooks.requirements import in_one_line, is_number

# A float32 sum of n squares may be off by n roundings, and on CPU torch.linalg.vector_norm is: the
# norm of 16 Mi equal elements comes out 0.9 % too small, so that clipping would miss C by as much.
# Of BLOCK elements it is off by at most BLOCK / 2 roundings; blocks are added up in float64.
_BLOCK = 256
# Covers the norm's rounding, (BLOCK / 2 + 1) 2^-24, and those of the factor and of the product.
_ROUNDING = 2.0**-16
# Squares of smaller elements underflow in float32, so that they would count for nothing.
_SMALLEST_NORM = 1e-10


def sample_norms(gradients: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return the Euclidean norm of each sample's gradient over all parameters.

    Args:
        gradients: float32, one ``(B, ...)`` per parameter.

    Returns:
        float64, ``(B,)``; infinite where float32 cannot hold the squares, so elements of 1e18 and
        less are safe.
    """
    parts = []
    for gradient in gradients:
        rows = _rows(gradient)
        whole = rows.shape[1] // _BLOCK * _BLOCK
        blocks = rows[:, :whole].unflatten(1, (whole // _BLOCK, _BLOCK))
        rest = torch.linalg.vector_norm(rows[:, whole:], dim=1, keepdim=True)
        norms = torch.cat([torch.linalg.vector_norm(blocks, dim=2), rest], dim=1)
        norm = torch.linalg.vector_norm(norms, dim=1, dtype=torch.float64)
        parts.append(norm.to(gradients[0].device))
    return torch.linalg.vector_norm(torch.stack(parts), dim=0)


def _rows(gradient: torch.Tensor) -> torch.Tensor:
    return gradient.reshape(len(gradient), gradient.shape[1:].numel())


def clip_factors(norms: torch.Tensor, max_grad_norm: float) -> torch.Tensor:
    """Return what to multiply each sample's gradient by: float32, ``(B,)``; 0 if not finite."""
    factors = (max_grad_norm * (1 - _ROUNDING) / norms).clamp(max=1.0)
    return torch.where(norms.isfinite(), factors, 0.0).float()


class SampleClipper(Settled, ClippedGradients):
    """Clips per-sample gradients, however they were computed, and adds them up.

    1. g <- scale g + shift, if there is a transform
    2. n <- the norm of g over all parameters; samples where it is not finite are left out
    3. sum <- sum + min(1, C (1 - 2^-16) / n) g, in float32

    The margin of 2^-16 covers the rounding of the norm and of the product, so that no sample's
    clipped gradient exceeds C.  The rounding of a float32 sum of n samples comes on top: it is less
    than n^2 2^-24 C, and in practice a few 2^-24 of the norm of the sum.

    Args:
        parameters: the trainable ones.
        max_grad_norm: C.

    Raises:
        ValueError: if there are no parameters, or C is not a finite number of at least 1e-10.
    """

    settled = frozenset({"parameters", "max_grad_norm"})

    def __init__(self, parameters: Sequence[torch.nn.Parameter], max_grad_norm: float) -> None:
        name = type(self).__name__
        if not is_number(max_grad_norm) or not _SMALLEST_NORM <= max_grad_norm < math.inf:
            raise ValueError(
                f"{name}: max_grad_norm must be a finite number of at least {_SMALLEST_NORM:g}, "
                f"got {in_one_line(max_grad_norm)}"
            )
        if not parameters:
            raise ValueError(f"{name}: the model has no parameters with requires_grad=True")
        self.parameters = list(parameters)
        self.max_grad_norm = float(max_grad_norm)
        self._warned = False
        self._start()

    def take(self) -> ClippedSum:
        """Return the sum since the last call, and start a new one."""
        taken = ClippedSum(self._sums, self._samples, self._not_finite)
        self._start()
        return taken

    def discard(self) -> None:
        """Forget the sum since the last call of :meth:`take`."""
        self._start()

    def _start(self) -> None:
        self._sums = [
            torch.zeros(p.shape, dtype=torch.float32, device=p.device) for p in self.parameters
        ]
        self._samples = 0
        self._not_finite = 0

    def _add_samples(self, gradients: Sequence[torch.Tensor]) -> None:
        """Clip gradients of samples, one ``(B, ...)`` per parameter, and add them to the sum."""
        if len(gradients[0]) == 0:
            return
        gradients = [gradient.detach().float() for gradient in gradients]
        if self.transform is not None:
            gradients = _transformed(gradients, self.transform)
        norms = sample_norms(gradients)
        factors = clip_factors(norms, self.max_grad_norm)
        finite = norms.isfinite()
        samples = int(finite.sum())
        if samples < len(norms):
            # Multiplying by zero would not do: 0 x infinity is NaN.
            gradients = [gradient[finite.to(gradient.device)] for gradient in gradients]
            factors = factors[finite]
        for total, gradient in zip(self._sums, gradients, strict=True):
            total.view(-1).addmv_(_rows(gradient).T, factors.to(gradient.device))
        self._count(samples, len(norms) - samples)

    def _count(self, samples: int, not_finite: int) -> None:
        self._samples += samples
        self._not_finite += not_finite
        if not_finite and not self._warned:
            self._warned = True
            warnings.warn(
                f"the gradients of {not_finite} samples are not finite: they are left out of the "
                "sum. This is said once; DPOptimizer.not_finite counts them",
                stacklevel=4,
            )


def _transformed(
    gradients: Sequence[torch.Tensor], transform: PublicTransform
) -> list[torch.Tensor]:
    shapes = [gradient.shape[1:] for gradient in gradients]
    for what, tensors in (("scale", transform.scale), ("shift", transform.shift)):
        if tensors is not None and [tensor.shape for tensor in tensors] != shapes:
            raise ValueError(
                f"transform.{what} must have one tensor per trainable parameter, shaped like it: "
                f"expected {[tuple(s) for s in shapes]}, got {[tuple(t.shape) for t in tensors]}"
            )
    if transform.shift is None:
        return [g * scale for g, scale in zip(gradients, transform.scale, strict=True)]
    return [
        torch.addcmul(shift, g, scale)
        for g, scale, shift in zip(gradients, transform.scale, transform.shift, strict=True)
    ]
