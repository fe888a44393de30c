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
    """Return the first half of :func:`resnet9`, for images of about 8x8 pixels."""
    return nn.Sequential(
        conv(channels, width),
        Residual(width),
        conv(width, 2 * width, pool=True),
        Residual(2 * width),
        Head(2 * width, classes),
    )


def resnet9(*, channels: int, classes: int, width: int) -> nn.Sequential:
    """Return the ResNet-9 known from DAWNBench (Page, 2018), for images of about 32x32 pixels.

    Convolutions of 1, 2, 4 and 8 times ``width`` channels, halving the resolution from the second
    on, with a residual pair after the second and the fourth; then the :class:`Head`.  Different
    from the original are GroupNorm and the bias of the last layer.

    6.6 M parameters at the original ``width=64``, 41 M at 160.  It must be a
    multiple of the 16 groups.
    """
    return nn.Sequential(
        conv(channels, width),
        conv(width, 2 * width, pool=True),
        Residual(2 * width),
        conv(2 * width, 4 * width, pool=True),
        conv(4 * width, 8 * width, pool=True),
        Residual(8 * width),
        Head(8 * width, classes),
    )
