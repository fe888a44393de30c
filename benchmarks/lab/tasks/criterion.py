"""How what a model returns is judged: the loss that is trained, and the error that people read."""

from dataclasses import dataclass
from typing import Protocol

import torch.nn.functional as F
from torch import Tensor


class Criterion(Protocol):
    """A way to compare a model's outputs with the targets of a batch."""

    def loss(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Return the mean over all predictions, which is trained."""

    def totals(self, outputs: Tensor, targets: Tensor) -> tuple[Tensor, Tensor, int]:
        """Return the sums of losses and of errors over all predictions, and how many there are.

        The loss is without what only helps the training, so that it compares between tasks.
        """


@dataclass(frozen=True)
class Classification:
    """Cross-entropy in nats; the error is the share of wrong predictions, 0 to 1.

    Outputs are logits, classes last; targets the classes, shaped like the other dimensions.

    Args:
        label_smoothing: of the trained loss; from 0 up to, not including, 1.

    Raises:
        ValueError: for a ``label_smoothing`` out of range.
    """

    label_smoothing: float = 0.0

    def __post_init__(self) -> None:
        if not 0 <= self.label_smoothing < 1:
            raise ValueError(f"label_smoothing must lie in [0, 1), got {self.label_smoothing!r}")

    def loss(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Return the mean cross-entropy, with label smoothing."""
        return F.cross_entropy(
            outputs.flatten(0, -2), targets.flatten(), label_smoothing=self.label_smoothing
        )

    def totals(self, outputs: Tensor, targets: Tensor) -> tuple[Tensor, Tensor, int]:
        """Return the sum of cross-entropies, without label smoothing, and of wrong predictions."""
        logits, classes = outputs.flatten(0, -2), targets.flatten()
        loss = F.cross_entropy(logits, classes, reduction="sum").double()
        return loss, logits.argmax(1).ne(classes).sum(), len(classes)


@dataclass(frozen=True)
class Reconstruction:
    """Squared distance of images whose pixels lie in [0, 1]; the error is that over the variance.

    Outputs are (batch, pixels); targets the images as bytes.  What is trained is the squared
    distance of an image, so that gradients are of the size that cross-entropy has; what is reported
    is the mean over pixels.  An error of 1 is that of the mean image, 0 that of a perfect copy.

    Args:
        variance: of a pixel over the images, in the mean of all pixels.
    """

    variance: float

    def loss(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Return the squared distance of an image, in the mean of the batch."""
        return F.mse_loss(outputs, scaled(targets).flatten(1), reduction="sum") / len(outputs)

    def totals(self, outputs: Tensor, targets: Tensor) -> tuple[Tensor, Tensor, int]:
        """Return the sum of the pixels' squared errors, and that over the variance."""
        loss = F.mse_loss(outputs, scaled(targets).flatten(1), reduction="sum").double()
        return loss, loss / self.variance, targets.numel()


def scaled(images: Tensor) -> Tensor:
    """Return images whose pixels lie in [0, 1], from bytes."""
    return images.float() / 255
