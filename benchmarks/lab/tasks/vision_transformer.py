"""A transformer that classifies images."""

import torch
from torch import Tensor, nn

from benchmarks.lab.model import Block


class VisionTransformer(nn.Module):
    """A pre-norm transformer over patches, with learned positions (Dosovitskiy et al., ICLR 2021).

    An image is judged by the mean over its patches' last hidden states (Beyer, Zhai & Kolesnikov,
    2022, who found no use for the token of its own that the original has).

    Args:
        channels: of the images.
        side: their height and width in pixels.
        patch: that of a patch, a divisor of ``side``.
        layers, width, heads: of the transformer.
        classes: to tell apart.
    """

    def __init__(
        self,
        *,
        channels: int,
        side: int,
        patch: int,
        layers: int,
        width: int,
        heads: int,
        classes: int,
    ) -> None:
        super().__init__()
        self.patches = nn.Conv2d(channels, width, kernel_size=patch, stride=patch)
        count = (side // patch) ** 2
        self.positions = nn.Parameter(torch.randn(count, width) * 0.02)
        self.blocks = nn.ModuleList(Block(width, heads, bias=True) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        self.classify = nn.Linear(width, classes)
        for module in self.modules():
            if isinstance(module, nn.Linear):
                nn.init.normal_(module.weight, std=0.02)
                nn.init.zeros_(module.bias)

    def forward(self, images: Tensor) -> Tensor:
        """Return logits (batch, classes) of images (batch, channels, side, side)."""
        x = self.patches(images).flatten(2).transpose(1, 2) + self.positions
        everything = torch.ones(x.shape[:2], dtype=torch.bool, device=x.device)
        for block in self.blocks:
            x = block(x, everything)
        return self.classify(self.norm(x).mean(1))
