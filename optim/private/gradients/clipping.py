"""Clipping of per-sample gradients and their sums, common to all ways to compute them."""

import math
import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from comm_hooks.optim.private.data.tickets import Read
from comm_hooks.optim.private.errors import PrivacyError, Settled
from comm_hooks.requirements import in_one_line, is_number

LossFunction = Callable[[nn.Module, Any], torch.Tensor]

# A float32 sum of n squares may be off by n roundings, and on CPU torch.linalg.vector_norm is: the
# norm of 16 Mi equal elements comes out 0.9 % too small, so that clipping would miss C by as much.
# Of BLOCK elements it is off by at most BLOCK / 2 roundings; blocks are added up in float64.
_BLOCK = 256
# Covers the norm's rounding, (BLOCK / 2 + 1) 2^-24, and those of the factor and of the product.
_ROUNDING = 2.0**-16
# Of float32 sums, as a part of the number of samples times C.
_SUM_ROUNDING = 1e-3
# Squares of smaller elements underflow in float32, so that they would count for nothing.
_SMALLEST_NORM = 1e-10


@dataclass(frozen=True)
class PublicTransform:
    """A transform of every sample's gradient g before it is clipped: g -> scale g + shift.

    ``scale`` and ``shift`` must be computed from public data or earlier releases.  Each has one
    tensor per trainable parameter, shaped like it.

    Attributes:
        scale: the elementwise factors.
        shift: the elementwise summands; None for no shift.
    """

    scale: Sequence[torch.Tensor]
    shift: Sequence[torch.Tensor] | None = None


@dataclass(frozen=True)
class ClippedSum:
    """The sum of clipped gradients of this rank's samples in one step.  Private: not noised.

    Attributes:
        tensors: float32, one per trainable parameter, shaped like it; zeros for an empty batch.
        samples: the number of samples in the sum.
        not_finite: the number of samples left out because their gradient is not finite.
        bound: the sum of the norms of the clipped gradients; None if it is not known.
    """

    tensors: list[torch.Tensor]
    samples: int
    not_finite: int = 0
    bound: float | None = None

    def require_bounded(self, max_grad_norm: float) -> None:
        """Raise ``PrivacyError`` if the sum is not one of so many clipped gradients.

        Its norm is at most the sum of theirs, and of one gradient it is that gradient's.
        """
        norm = float(sample_norms([tensor[None] for tensor in self.tensors]))
        most = self.samples * max_grad_norm
        bound = most if self.bound is None else min(self.bound, most)
        rounding = _SUM_ROUNDING * most
        is_less = self.samples == 1 and self.bound is not None and norm < bound - rounding
        if is_less or not norm <= bound + rounding:
            raise PrivacyError(
                f"the sum of {self.samples} clipped gradients has the norm {norm:g}, and those "
                f"have the norms that add up to {bound:g}: something else has changed the sum. "
                "Nothing was released"
            )


class ClippedGradients(ABC):
    """A source of clipped sums of per-sample gradients: the base of all implementations.

    One sample changes a sum by at most ``max_grad_norm``, in Euclidean norm over all parameters.

    Attributes:
        parameters: the trainable parameters, in the order of all lists of tensors.
        max_grad_norm: C, the norm to which each sample's gradient is clipped after the transform.
        transform: the transform of every sample's gradient before clipping, or None.  Set it
            before the first sample of a step.
    """

    parameters: list[torch.nn.Parameter]
    max_grad_norm: float
    transform: PublicTransform | None = None

    def samples_in(self, batch: Any) -> int:
        """Return the number of samples in a batch for :meth:`backward`.

        Raises:
            ValueError: if the number of samples is ambiguous.
        """
        return len(batch)

    @abstractmethod
    def backward(self, batch: Any, read: Read | None = None) -> torch.Tensor:
        """Add the clipped gradients of a batch to the sum; return the mean loss, detached.

        Args:
            batch: the batch.
            read: reads one of its samples again, by its row, for checks.
        """

    @abstractmethod
    def take(self) -> ClippedSum:
        """Return the sum of the clipped gradients since the last call, and reset it to zero."""

    def discard(self) -> None:
        """Reset the sum of the clipped gradients to zero."""
        self.take()


def sample_norms(gradients: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return the Euclidean norm of each sample's gradient over all parameters.

    Args:
        gradients: the gradients of B samples, float32, one ``(B, ...)`` per parameter.

    Returns:
        float64, ``(B,)``; infinite where float32 cannot hold the squares, which is safe for
        elements up to 1e18.
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
    """Return the factors, float32 ``(B,)``, that clip gradients of these norms; 0 for inf, NaN."""
    factors = (max_grad_norm * (1 - _ROUNDING) / norms).clamp(max=1.0)
    return torch.where(norms.isfinite(), factors, 0.0).float()


class SampleClipper(Settled, ClippedGradients):
    """A base class that clips per-sample gradients and adds them up.  For each sample's gradient g:

    1. g <- scale g + shift, if there is a transform
    2. n <- the norm of g over all parameters; samples where it is not finite are left out
    3. sum <- sum + min(1, C (1 - 2^-16) / n) g, in float32

    The margin of 2^-16 covers the rounding of the norm and of the product, so that no sample's
    clipped gradient exceeds C.  The rounding of a float32 sum of k samples comes on top: it is less
    than k^2 2^-24 C, and in practice a few 2^-24 of the norm of the sum.

    Args:
        parameters: the trainable parameters.
        max_grad_norm: C, the norm to which each sample's gradient is clipped.

    Raises:
        ValueError: if there are no parameters, or C is not a finite number of at least 1e-10.
    """

    settled = frozenset({"parameters", "max_grad_norm"})

    def __init__(self, parameters: Sequence[torch.nn.Parameter], max_grad_norm: float) -> None:
        if not is_number(max_grad_norm) or not _SMALLEST_NORM <= max_grad_norm < math.inf:
            raise ValueError(
                f"{type(self).__name__}: max_grad_norm must be a finite number of at least "
                f"{_SMALLEST_NORM:g}, got {in_one_line(max_grad_norm)}"
            )
        if not parameters:
            raise ValueError(
                f"{type(self).__name__}: the model has no parameters with requires_grad=True"
            )
        self.parameters = list(parameters)
        self.max_grad_norm = float(max_grad_norm)
        self._warned = False
        self._start()

    def take(self) -> ClippedSum:
        """Return the sum of the clipped gradients since the last call, and reset it to zero."""
        taken = ClippedSum(self._sums, self._samples, self._not_finite, float(self._bound))
        self._start()
        return taken

    def _start(self) -> None:
        self._sums = [
            torch.zeros(p.shape, dtype=torch.float32, device=p.device) for p in self.parameters
        ]
        self._samples = 0
        self._not_finite = 0
        self._bound = torch.zeros((), dtype=torch.float64)

    def _add_samples(self, gradients: Sequence[torch.Tensor]) -> None:
        """Clip samples' gradients, one ``(B, ...)`` per parameter, and add them to the sum."""
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
            norms, factors = norms[finite], factors[finite]
        for total, gradient in zip(self._sums, gradients, strict=True):
            total.view(-1).addmv_(_rows(gradient).T, factors.to(gradient.device))
        not_finite = len(finite) - samples
        self._bound = self._bound + (norms * factors).sum()
        self._samples += samples
        self._not_finite += not_finite
        if not_finite and not self._warned:
            self._warned = True
            warnings.warn(
                f"the gradients of {not_finite} samples are not finite: they are left out of the "
                "sum. Warned once; DPOptimizer.not_finite counts them",
                stacklevel=3,
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
