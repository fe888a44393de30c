"""A transformer encoder that classifies texts."""

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from benchmarks.lab.model import Block

PADDING = 0
"""The token that fills up short texts; the model does not see it."""


@dataclass(frozen=True)
class EncoderConfig:
    """The shape of an :class:`Encoder`.  The defaults make 1.7 million parameters.

    ``EncoderConfig(12, 768, 12, 512, 30522)`` is BERT-base, of 109 million.
    """

    layers: int = 2
    width: int = 128
    heads: int = 4
    length: int = 64
    vocabulary: int = 10_000

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if value < 1:
                raise ValueError(f"{name} must be at least 1, got {value!r}")
        if self.width % self.heads:
            raise ValueError(f"width {self.width} is not a multiple of the {self.heads} heads")


class Encoder(nn.Module):
    """A bidirectional pre-norm transformer with learned positions over tokens.

    Texts are judged by the mean over their tokens' last hidden states.  Made of linear layers, so
    that tools which hook those for gradients of single samples find every weight.

    Different from BERT: norms come first, so that it trains from scratch without a warm-up; the
    mean instead of a layer on top of the first token; no segments; no dropout.
    """

    def __init__(self, config: EncoderConfig, classes: int) -> None:
        super().__init__()
        self.tokens = nn.Embedding(config.vocabulary, config.width)
        self.positions = nn.Embedding(config.length, config.width)
        self.blocks = nn.ModuleList(
            Block(config.width, config.heads, bias=True) for _ in range(config.layers)
        )
        self.norm = nn.LayerNorm(config.width)
        self.classify = nn.Linear(config.width, classes)
        for module in self.modules():
            if isinstance(module, nn.Linear | nn.Embedding):
                nn.init.normal_(module.weight, std=0.02)
            if isinstance(module, nn.Linear):
                nn.init.zeros_(module.bias)

    def forward(self, tokens: Tensor) -> Tensor:
        """Return logits (batch, classes) of texts (batch, time), each with a token or more."""
        real = tokens != PADDING
        places = torch.arange(tokens.shape[1], device=tokens.device)
        x = self.tokens(tokens) + self.positions(places)
        for block in self.blocks:
            x = block(x, real)
        weights = real.to(x.dtype) / real.sum(1, keepdim=True)
        return self.classify((weights.unsqueeze(2) * self.norm(x)).sum(1))
