"""Parameters and gradients that are the same in torch and in NumPy."""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.optim.lr_scheduler import LRScheduler

SHAPES = {"weight": (6, 5), "bias": (7,), "scalar": ()}
STEPS = 40
HYPER: dict[str, Any] = {"lr": 1e-2, "betas": (0.8, 0.95), "eps": 1e-6}


def start(name: str) -> np.ndarray:
    return np.random.default_rng(len(name)).normal(size=SHAPES[name])


def gradient(name: str, step: int) -> np.ndarray | None:
    """Shrinking, so that a maximum matters; the bias has none in every third step."""
    if name == "bias" and step % 3 == 1:
        return None
    return np.random.default_rng([len(name), step]).normal(size=SHAPES[name]) * 0.93**step


def parameters_of(dtype: torch.dtype = torch.float64) -> dict[str, nn.Parameter]:
    return {name: nn.Parameter(torch.tensor(start(name), dtype=dtype)) for name in SHAPES}


def run(
    parameters: dict[str, nn.Parameter],
    optimizer: torch.optim.Optimizer,
    scheduler: LRScheduler | None = None,
    steps: Sequence[int] = range(STEPS),
    step: Callable[[], object] | None = None,
) -> dict[str, torch.Tensor]:
    for t in steps:
        for name, parameter in parameters.items():
            g = gradient(name, t)
            parameter.grad = None if g is None else torch.tensor(g, dtype=parameter.dtype)
        (step or optimizer.step)()
        if scheduler:
            scheduler.step()
    return {name: p.detach().clone() for name, p in parameters.items()}
