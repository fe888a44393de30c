"""Losses of samples that depend on each other, in every way that we know of, and that do not."""

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from tests.optim.private.clipped_sums import sample_losses as entropies

WIDTH = 12
CLASSES = 5
Loss = Callable[[nn.Module, Any], torch.Tensor]


class Normalizes(nn.Module):
    """A batch normalization that nobody knows by its class."""

    def __init__(self, *, detached: bool = False, always: bool = True) -> None:
        super().__init__()
        self.detached, self.always = detached, always

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        if not (self.training or self.always):
            return inputs
        statistics = inputs.detach() if self.detached else inputs
        variance = statistics.var(0, correction=0)
        return (inputs - statistics.mean(0)) / (variance + 0.1).sqrt()


def mlp(*between: nn.Module) -> nn.Module:
    return nn.Sequential(nn.Linear(WIDTH, 16), *between, nn.Tanh(), nn.Linear(16, CLASSES))


class Words(nn.Module):
    """Classifies each token of a sequence by itself."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.output = nn.Embedding(20, 8), nn.Linear(8, CLASSES)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.output(torch.tanh(self.embedding(tokens)))


def of_tokens(model: nn.Module, tokens: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(model(tokens).mT, tokens % CLASSES, reduction="none")


def token_mean(model: nn.Module, tokens: torch.Tensor) -> torch.Tensor:
    return of_tokens(model, tokens).sum(1) / tokens.numel()


def contrastive(model: nn.Module, batch: Any) -> torch.Tensor:
    outputs = model(batch[0])
    one, other = (F.normalize(x, dim=1) for x in (outputs, outputs + outputs.flip(1)))
    return -torch.log_softmax(one @ other.T / 0.5, dim=1).diagonal()


def divided(model: nn.Module, batch: Any) -> torch.Tensor:
    return entropies(model, batch) / len(batch[0])


def pairs(model: nn.Module, batch: Any) -> torch.Tensor:
    outputs = model(batch[0]).sum(1)
    places = torch.arange(len(outputs))
    return (outputs - outputs[(places ^ 1).clamp(max=len(outputs) - 1)]).square() + outputs**2


def weighted(model: nn.Module, batch: Any) -> torch.Tensor:
    weights = batch[0][:, 0].abs()
    return entropies(model, batch) * weights / weights.sum()


def softmax_over_the_batch(model: nn.Module, batch: Any) -> torch.Tensor:
    return -torch.log_softmax(model(batch[0]), dim=0).gather(1, batch[1][:, None])[:, 0]


def detached_scale(model: nn.Module, batch: Any) -> torch.Tensor:
    losses = entropies(model, batch)
    return losses / losses.detach().mean()


# How a model is made, and what its loss is.
DEPENDENT: dict[str, tuple[Callable[[], nn.Module], Loss]] = {
    "batch norm": (lambda: mlp(Normalizes()), entropies),
    "batch norm in training": (lambda: mlp(Normalizes(always=False)), entropies),
    "batch norm, detached": (lambda: mlp(Normalizes(detached=True)), entropies),
    "token mean": (Words, token_mean),
    "contrastive": (mlp, contrastive),
    "divided by the batch size": (mlp, divided),
    "divided, with dropout": (lambda: mlp(nn.Dropout(0.3)), divided),
    "pairs": (mlp, pairs),
    "weights": (mlp, weighted),
    "softmax over the batch": (mlp, softmax_over_the_batch),
    "detached statistics of the loss": (mlp, detached_scale),
}


class Transformer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(20, 8)
        self.block = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.2, batch_first=True)
        self.output = nn.Linear(8, CLASSES)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.output(self.block(self.embedding(tokens)).mean(1))


class Noisy(nn.Module):
    """Random in every mode, which no ``eval()`` ends."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = mlp()

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return self.layer(inputs + 0.1 * torch.randn_like(inputs))


def deep() -> nn.Module:
    layers = [nn.Sequential(nn.Linear(32, 32), nn.LayerNorm(32), nn.GELU()) for _ in range(8)]
    return nn.Sequential(nn.Linear(WIDTH, 32), *layers, nn.Linear(32, CLASSES))


def confident() -> nn.Module:
    """Whose losses are nearly zero, of scores that are not."""
    model = mlp()
    with torch.no_grad():
        model[-1].weight.mul_(5.0)
        model[-1].bias.copy_(torch.tensor([20.0, 0.0, 0.0, 0.0, 0.0]))
    return model


def masked_mean(model: nn.Module, tokens: torch.Tensor) -> torch.Tensor:
    counts = tokens != 0
    return (of_tokens(model, tokens) * counts).sum(1) / counts.sum(1).clamp(min=1)


def probabilities(model: nn.Module, batch: Any) -> torch.Tensor:
    inputs, labels = batch
    target = F.one_hot(labels, CLASSES).to(inputs)
    return F.binary_cross_entropy(
        model(inputs).sigmoid().float(), target.float(), reduction="none"
    ).mean(1)


INDEPENDENT: dict[str, tuple[Callable[[], nn.Module], Loss]] = {
    "mlp": (mlp, entropies),
    "deep": (deep, entropies),
    "confident": (confident, entropies),
    "dropout": (lambda: mlp(nn.Dropout(0.5)), entropies),
    "noisy": (Noisy, entropies),
    "probabilities": (mlp, probabilities),
    "transformer": (
        Transformer,
        lambda m, t: F.cross_entropy(m(t), t[:, 0] % CLASSES, reduction="none"),
    ),
    "embedding with padding": (Words, masked_mean),
}


def draw(model: nn.Module, rows: int, dtype: torch.dtype, seed: int, size: float = 1.0) -> Any:
    """Return a batch for a model: tokens, or numbers and labels."""
    generator = torch.Generator().manual_seed(seed)
    if any(isinstance(module, nn.Embedding) for module in model.modules()):
        return torch.randint(20, (rows, 7), generator=generator)
    inputs = size * torch.randn(rows, WIDTH, generator=generator)
    return inputs.to(dtype), torch.randint(CLASSES, (rows,), generator=generator)
