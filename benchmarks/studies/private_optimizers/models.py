"""Networks that define gradients of single samples: GroupNorm, and no batch statistics."""

import itertools

import torch
import torch.nn.functional as F
from torch import Tensor, nn

GROUPS = 16
_EPS = 1e-8


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


class StandardizedConv2d(nn.Conv2d):
    """A convolution without bias whose filters are standardized in every forward pass.

    With w the weights of one filter and n how many it has, those that are applied are
    (w - mean(w)) / sqrt(n var(w)): variance-preserving whatever w is.

    Source: weight standardization, Qiao et al., arXiv 1903.10520; the factor 1 / sqrt(n) is Brock
    et al.'s, ICLR 2021, without their gain.
    """

    def __init__(self, inputs: int, outputs: int, kernel_size: int, stride: int = 1) -> None:
        super().__init__(inputs, outputs, kernel_size, stride, padding=kernel_size // 2, bias=False)

    def standardized(self) -> Tensor:
        """Return the filters that are applied, shaped like ``weight``."""
        filters = self.weight.flatten(1)
        centred = filters - filters.mean(1, keepdim=True)
        scale = torch.rsqrt(centred.square().sum(1, keepdim=True) + _EPS)
        return (centred * scale).view_as(self.weight)

    def forward(self, x: Tensor) -> Tensor:
        """Map images (batch, inputs, height, width) to (batch, outputs, ...)."""
        return F.conv2d(x, self.standardized(), None, self.stride, self.padding)


class Block(nn.Module):
    """Two convolutions, each after a norm and ReLU, beside a shortcut (He et al., ECCV 2016).

    Where the shape changes, the shortcut is a 1x1 convolution of the normalized input.
    """

    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.norm1 = nn.GroupNorm(GROUPS, inputs)
        self.conv1 = StandardizedConv2d(inputs, outputs, 3, stride)
        self.norm2 = nn.GroupNorm(GROUPS, outputs)
        self.conv2 = StandardizedConv2d(outputs, outputs, 3)
        self.shortcut = (
            None
            if inputs == outputs and stride == 1
            else StandardizedConv2d(inputs, outputs, 1, stride)
        )

    def forward(self, x: Tensor) -> Tensor:
        """Map images (batch, inputs, height, width) to (batch, outputs, ...)."""
        y = F.relu(self.norm1(x))
        beside = x if self.shortcut is None else self.shortcut(y)
        return beside + self.conv2(F.relu(self.norm2(self.conv1(y))))


def wide_resnet(*, depth: int = 16, factor: int = 4, classes: int = 10) -> nn.Sequential:
    """Return a wide residual network, by default WRN-16-4: 2.75 M parameters.

    For colour images of 32x32 pixels: one convolution to 16 channels; three groups of
    ``(depth - 4) / 6`` blocks with 16, 32 and 64 times ``factor`` channels, the second and the
    third of which halve the resolution; norm, ReLU, the mean over the image, a linear layer.

    Source: Zagoruyko & Komodakis, BMVC 2016; GroupNorm of 16 groups and weight standardization as
    in De et al., "Unlocking High-Accuracy Differentially Private Image Classification through
    Scale", 2022.
    """
    widths = [16, 16 * factor, 32 * factor, 64 * factor]
    blocks: list[nn.Module] = []
    for group, (inputs, outputs) in enumerate(itertools.pairwise(widths)):
        for number in range((depth - 4) // 6):
            stride = 2 if group and not number else 1
            blocks.append(Block(outputs if number else inputs, outputs, stride))
    return nn.Sequential(
        StandardizedConv2d(3, widths[0], 3),
        *blocks,
        nn.GroupNorm(GROUPS, widths[-1]),
        nn.ReLU(),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(widths[-1], classes),
    )
