"""A small GPT over bytes: large enough to have something to compress, small enough for a CPU."""

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

VOCABULARY = 256


@dataclass(frozen=True)
class GPTConfig:
    """The shape of a :class:`GPT`. The defaults make 4.8 million parameters.

    With more than one expert each block has so many MLPs, two of them for each token.
    """

    layers: int = 6
    width: int = 256
    heads: int = 8
    context: int = 128
    experts: int = 1


def count(make_model: Callable[[], nn.Module]) -> int:
    """Return the number of parameters of a model, without making it."""
    with torch.device("meta"):
        return sum(parameter.numel() for parameter in make_model().parameters())


class MLP(nn.Sequential):
    """Two linear layers, the hidden one four times as wide."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.widen = nn.Linear(width, 4 * width)
        self.gelu = nn.GELU()
        self.narrow = nn.Linear(4 * width, width)


class Experts(nn.Module):
    """A mixture of MLPs, the best two for each token (Mixtral; Jiang et al., 2024).

    1. a linear router scores the experts; the softmax of the two best scores are their weights;
    2. a token's output is the weighted sum of those two experts' outputs.

    There is no loss that balances the experts.
    """

    def __init__(self, width: int, experts: int) -> None:
        super().__init__()
        self.router = nn.Linear(width, experts, bias=False)
        self.experts = nn.ModuleList(MLP(width) for _ in range(experts))

    def forward(self, x: Tensor) -> Tensor:
        """Map hidden states of shape (batch, time, width) to the same shape."""
        tokens = x.flatten(0, 1)
        scores, chosen = self.router(tokens).topk(2)
        weights = scores.softmax(-1)
        mixed = torch.zeros_like(tokens)
        for number, expert in enumerate(self.experts):
            rows, place = (chosen == number).nonzero(as_tuple=True)
            mixed = mixed.index_add(0, rows, weights[rows, place, None] * expert(tokens[rows]))
        return mixed.view_as(x)


class Block(nn.Module):
    """One pre-norm transformer block: attention, then an MLP or a mixture of them.

    Args:
        width: of the hidden states.
        heads: of the attention; a divisor of ``width``.
        bias: whether the attention has biases.
        experts: MLPs.
    """

    def __init__(self, width: int, heads: int, *, bias: bool, experts: int = 1) -> None:
        super().__init__()
        self.heads = heads
        self.attention_norm = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width, bias=bias)
        self.attention_out = nn.Linear(width, width, bias=bias)
        self.mlp_norm = nn.LayerNorm(width)
        self.mlp = MLP(width) if experts == 1 else Experts(width, experts)

    def forward(self, x: Tensor, real: Tensor | None = None) -> Tensor:
        """Map hidden states of shape (batch, time, width) to the same shape.

        Attention is causal, or, where ``real`` (batch, time) is given, to all tokens that are.
        """
        batch, time, width = x.shape
        qkv = self.qkv(self.attention_norm(x)).view(batch, time, 3, self.heads, -1)
        query, key, value = qkv.permute(2, 0, 3, 1, 4)
        mask = None if real is None else real[:, None, None, :]
        attended = F.scaled_dot_product_attention(
            query, key, value, attn_mask=mask, is_causal=mask is None
        )
        x = x + self.attention_out(attended.transpose(1, 2).reshape(batch, time, width))
        return x + self.mlp(self.mlp_norm(x))


class GPT(nn.Module):
    """A decoder-only transformer with learned positions and a tied output embedding.

    Initialised as GPT-2: normal with deviation 0.02, and the projections that write into the
    residual stream divided by sqrt(2 · layers), so that its variance does not grow with depth.
    """

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.context = config.context
        self.tokens = nn.Embedding(VOCABULARY, config.width)
        self.positions = nn.Embedding(config.context, config.width)
        self.blocks = nn.ModuleList(
            Block(config.width, config.heads, bias=False, experts=config.experts)
            for _ in range(config.layers)
        )
        self.norm = nn.LayerNorm(config.width)

        for name, parameter in self.named_parameters():
            if parameter.ndim == 1:
                continue  # biases are set below, the norms start as the identity
            writes_residual = name.endswith(("attention_out.weight", "narrow.weight"))
            scale = 1 / math.sqrt(2 * config.layers) if writes_residual else 1.0
            nn.init.normal_(parameter, std=0.02 * scale)
        for module in self.modules():
            if isinstance(module, nn.Linear) and module.bias is not None:
                nn.init.zeros_(module.bias)

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        """Return the mean cross-entropy, in nats per byte, of predicting ``targets``."""
        return F.cross_entropy(self.logits(tokens).flatten(0, 1), targets.flatten())

    def logits(self, tokens: Tensor) -> Tensor:
        """Return the logits (batch, time, 256) of the byte after each of ``tokens``."""
        positions = torch.arange(tokens.shape[1], device=tokens.device)
        x = self.tokens(tokens) + self.positions(positions)
        for block in self.blocks:
            x = block(x)
        return F.linear(self.norm(x), self.tokens.weight)
