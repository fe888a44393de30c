"""Networks that define gradients of single samples: GroupNorm, and no batch statistics."""

from torch import nn


def small_cnn(*, channels: int = 1, classes: int = 10, width: int = 16) -> nn.Sequential:
    """Return two convolutions and a linear layer, for images of 8x8 pixels: 10 k parameters.

    Args:
        channels: of the images.
        classes: how many logits to return.
        width: channels of the first convolution, a multiple of 4; the second has twice as many.
    """
    return nn.Sequential(
        nn.Conv2d(channels, width, 3, padding=1, bias=False),
        nn.GroupNorm(4, width),
        nn.ReLU(),
        nn.Conv2d(width, 2 * width, 3, stride=2, padding=1, bias=False),
        nn.GroupNorm(4, 2 * width),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(2 * width * 16, classes),
    )
