"""Residual networks without batch statistics.

GroupNorm (Wu & He, ECCV 2018) instead of BatchNorm: its statistics are a sample's own, so a small
or one-sided client batch does not distort them, nothing but parameters needs to be averaged between
clients, and gradients of single samples are defined.
"""

from torch import Tensor, nn

GROUPS = 16
"""Groups of channels that are normalized together; widths are multiples of this."""


def conv(inputs: int, outputs: int, *, pool: bool = False) -> nn.Sequential:
    """Return a 3x3 convolution, its norm and ReLU; with ``pool``, halving the resolution."""
    return nn.Sequential(
        nn.Conv2d(inputs, outputs, kernel_size=3, padding=1, bias=False),
        nn.GroupNorm(GROUPS, outputs),
        nn.ReLU(),
        *([nn.MaxPool2d(2)] if pool else []),
    )


class Residual(nn.Module):
    """x + two convolutions of x."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.first = conv(channels, channels)
        self.second = conv(channels, channels)

    def forward(self, x: Tensor) -> Tensor:
        """Map images (batch, channels, height, width) to the same shape."""
        return x + self.second(self.first(x))


class Head(nn.Module):
    """Logits, scaled down, from the maximum of each channel over the image.

    Maxima of normalized channels are large.  Without the scale, the first steps at the usual
    learning rates drive the logits so far apart that hundreds more go into bringing them back.
    """

    SCALE = 0.125

    def __init__(self, channels: int, classes: int) -> None:
        super().__init__()
        self.classify = nn.Linear(channels, classes)

    def forward(self, x: Tensor) -> Tensor:
        """Map images (batch, channels, height, width) to logits (batch, classes)."""
        return self.SCALE * self.classify(x.amax(dim=(2, 3)))


def resnet7(*, channels: int, classes: int, width: int) -> nn.Sequential:
    """Return a residual network for images of about 8x8 pixels.

    It is the first half of the ResNet-9 known from DAWNBench (Page, 2018), with GroupNorm.
    """
    return nn.Sequential(
        conv(channels, width),
        Residual(width),
        conv(width, 2 * width, pool=True),
        Residual(2 * width),
        Head(2 * width, classes),
    )
