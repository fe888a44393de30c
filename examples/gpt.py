"""What the examples share: a small GPT, and text that every machine has."""

import math
import sysconfig
from pathlib import Path

import torch
from torch import nn

CONTEXT = 64  # bytes


def text(rank: int, ranks: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return this rank's part of Python's standard library, and held-out text, as bytes."""
    files = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
    data = torch.frombuffer(bytearray(b"".join(f.read_bytes() for f in files)), dtype=torch.uint8)
    held_out, rest = data[: len(data) // 20], data[len(data) // 20 :]
    return rest.chunk(ranks)[rank].long(), held_out.long()


def batch(data: torch.Tensor, size: int, step: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return inputs and targets, both (size, CONTEXT), drawn by the number of the step."""
    generator = torch.Generator().manual_seed(step)
    starts = torch.randint(len(data) - CONTEXT - 1, (size,), generator=generator)
    rows = torch.stack([data[i : i + CONTEXT + 1] for i in starts])
    return rows[:, :-1], rows[:, 1:]


class GPT(nn.Module):
    """A decoder of bytes."""

    def __init__(self, width: int = 128, layers: int = 2) -> None:
        super().__init__()
        self.bytes = nn.Embedding(256, width)
        self.places = nn.Embedding(CONTEXT, width)
        self.blocks = nn.ModuleList(
            nn.TransformerEncoderLayer(
                width, 4, 4 * width, dropout=0.0, batch_first=True, norm_first=True
            )
            for _ in range(layers)
        )
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, 256, bias=False)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        """Return logits, (size, CONTEXT, 256)."""
        length = inputs.shape[1]
        hidden = self.bytes(inputs) + self.places.weight[:length]
        mask = nn.Transformer.generate_square_subsequent_mask(length, device=inputs.device)
        for block in self.blocks:
            hidden = block(hidden, src_mask=mask, is_causal=True)
        return self.head(self.norm(hidden))


def loss_of(model: nn.Module, inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Return the mean cross-entropy, in nats per byte."""
    return nn.functional.cross_entropy(model(inputs).flatten(0, 1), targets.flatten())


def warm_cosine(optimizer: torch.optim.Optimizer, steps: int) -> torch.optim.lr_scheduler.LambdaLR:
    """Return a schedule: a warm-up over a tenth of the steps, then a half cosine."""
    warm_up = max(1, steps // 10)

    def factor(step: int) -> float:
        return min(1.0, (step + 1) / warm_up) * (1 + math.cos(math.pi * min(1.0, step / steps))) / 2

    return torch.optim.lr_scheduler.LambdaLR(optimizer, factor)


def evaluate(model: nn.Module, held_out: torch.Tensor) -> float:
    """Return the loss on held-out text, of the model that all ranks share: in evaluation mode."""
    model.eval()
    with torch.no_grad():
        losses = [loss_of(model, *batch(held_out, 64, -1 - i)).item() for i in range(4)]
    model.train()
    return sum(losses) / len(losses)
