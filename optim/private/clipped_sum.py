"""The contract between whatever computes per-sample gradients and the mechanism that adds noise."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch


@dataclass(frozen=True)
class PublicTransform:
    """What is done to every sample's gradient before it is clipped: g -> scale g + shift.

    Both must be public: from public data, or from what was released with noise.  One tensor per
    trainable parameter, shaped like it.

    Attributes:
        scale: elementwise factors.
        shift: what is added afterwards; None for nothing.
    """

    scale: Sequence[torch.Tensor]
    shift: Sequence[torch.Tensor] | None = None


@dataclass(frozen=True)
class ClippedSum:
    """The sum, over this rank's samples of one step, of clipped gradients.  Private: not noised.

    Attributes:
        tensors: float32, one per trainable parameter, shaped like it; zeros for an empty batch.
        samples: how many samples are in it.
        not_finite: how many more were left out because their gradient was not finite.
    """

    tensors: list[torch.Tensor]
    samples: int
    not_finite: int = 0


class ClippedGradients(ABC):
    """Computes clipped sums of per-sample gradients.

    One sample changes a sum by at most ``max_grad_norm``, in Euclidean norm over all parameters.

    Attributes:
        parameters: the trainable ones, in the order of all lists of tensors.
        max_grad_norm: C, after the transform.
        transform: applied to every sample's gradient before clipping; None for none.  Set before
            the first sample of a step.
    """

    parameters: list[torch.nn.Parameter]
    max_grad_norm: float
    transform: PublicTransform | None = None

    def samples_in(self, batch: Any) -> int:
        """Return how many samples :meth:`backward` would add.

        Raises:
            ValueError: if that cannot be said.
        """
        return len(batch)

    @abstractmethod
    def backward(self, batch: Any) -> torch.Tensor:
        """Add the clipped gradients of a batch; return its mean loss, detached."""

    @abstractmethod
    def take(self) -> ClippedSum:
        """Return the sum since the last call, and start a new one."""

    def discard(self) -> None:
        """Forget the sum since the last :meth:`take`."""
        self.take()
