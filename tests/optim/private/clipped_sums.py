"""Models, batches and what a clipped sum must be, for tests of per-sample gradients."""

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn import functional as F

from comm_hooks.optim.private.gradients.clipping import ClippedSum

Batch = tuple[torch.Tensor, torch.Tensor]


def loss_function(model: nn.Module, batch: Batch) -> torch.Tensor:
    inputs, labels = batch
    return F.cross_entropy(model(inputs), labels)


def sample_losses(model: nn.Module, batch: Batch) -> torch.Tensor:
    inputs, labels = batch
    return F.cross_entropy(model(inputs), labels, reduction="none")


class Tied(nn.Module):
    """An embedding whose weight is the output layer's, too, and a layer that is used twice."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(10, 6)
        self.layer = nn.Linear(6, 6)
        self.output = nn.Linear(6, 10)
        self.output.weight = self.embedding.weight

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        places = (inputs[:, :3].abs() * 5).long().clamp(max=9)
        hidden = torch.tanh(self.layer(self.embedding(places)))
        return self.output(torch.tanh(self.layer(hidden)).mean(1))


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(12, 40), nn.Tanh(), nn.Linear(40, 10))


def cnn() -> nn.Module:
    return nn.Sequential(
        nn.Unflatten(1, (3, 2, 2)),
        nn.Conv2d(3, 8, 3, padding=1),
        nn.GroupNorm(2, 8),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(32, 10),
    )


def attention() -> nn.Module:
    block = nn.TransformerEncoderLayer(4, 2, 8, dropout=0.0, batch_first=True)
    return nn.Sequential(nn.Unflatten(1, (3, 4)), block, nn.Flatten(), nn.Linear(12, 10))


MODELS: dict[str, Callable[[], nn.Module]] = {
    "mlp": mlp,
    "cnn": cnn,
    "attention": attention,
    "tied": Tied,
}


def make(name: str, seed: int = 0, dtype: torch.dtype = torch.float32) -> nn.Module:
    torch.manual_seed(seed)
    return MODELS[name]().to(dtype)


def draw(samples: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Batch:
    generator = torch.Generator().manual_seed(seed)
    inputs = torch.randn(samples, 12, generator=generator).to(dtype)
    return inputs, torch.randint(10, (samples,), generator=generator)


def sample_gradients(model: nn.Module, batch: Batch, loss: Any = loss_function) -> list[Any]:
    """Return for each sample the gradients of the trainable parameters, by plain autograd."""
    parameters = [p for p in model.parameters() if p.requires_grad]
    inputs, labels = batch
    return [
        [
            g.double().numpy()
            for g in torch.autograd.grad(
                loss(model, (inputs[i : i + 1], labels[i : i + 1])), parameters
            )
        ]
        for i in range(len(inputs))
    ]


def clipped_sum(
    gradients: list[Any],
    max_grad_norm: float,
    scale: list[np.ndarray] | None = None,
    shift: list[np.ndarray] | None = None,
) -> list[np.ndarray]:
    """Return what the docstring says, in NumPy and float64."""
    total: list[Any] = [0.0] * len(gradients[0])
    for sample in gradients:
        if scale is not None:
            sample = [s * g for s, g in zip(scale, sample, strict=True)]
        if shift is not None:
            sample = [g + s for s, g in zip(shift, sample, strict=True)]
        norm = np.sqrt(sum(np.square(g).sum() for g in sample))
        factor = min(1.0, max_grad_norm / norm)
        total = [t + factor * g for t, g in zip(total, sample, strict=True)]
    return total


def norm(tensors: Any) -> float:
    return float(np.sqrt(sum(t.double().square().sum().item() for t in tensors)))


def distance(a: ClippedSum, b: ClippedSum) -> float:
    return norm([s.double() - t.double() for s, t in zip(a.tensors, b.tensors, strict=True)])
