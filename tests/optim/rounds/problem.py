"""A quadratic per client, small enough for references in NumPy, and compressors to match."""

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import nn

Arrays = dict[str, np.ndarray]
SHAPES = {"weight": (16, 40), "bias": (9,)}


def _draw(*key: int | str) -> np.random.Generator:
    return np.random.default_rng([len(k) if isinstance(k, str) else k for k in key])


def start() -> Arrays:
    return {name: _draw(name).normal(size=shape) for name, shape in SHAPES.items()}


def gradient(name: str, step: int, client: int, x: np.ndarray) -> np.ndarray:
    """Every client pulls to a point of its own, with noise of its own."""
    curvature = _draw(name, 5).uniform(0.2, 1.0, size=x.shape)
    target = _draw(name, 6).normal(size=x.shape) + _draw(name, 7, client).normal(size=x.shape)
    return curvature * (x - target) + 0.1 * _draw(name, 8, client, step).normal(size=x.shape)


def make_parameters() -> dict[str, nn.Parameter]:
    return {n: nn.Parameter(torch.from_numpy(x).float()) for n, x in start().items()}


def set_gradients(parameters: dict[str, nn.Parameter], step: int, client: int) -> None:
    for name, p in parameters.items():
        x = p.detach().double().numpy()
        p.grad = torch.from_numpy(gradient(name, step, client, x)).float()


def values(parameters: dict[str, nn.Parameter]) -> Arrays:
    return {n: p.detach().numpy().copy() for n, p in parameters.items()}


def signs(x: np.ndarray) -> np.ndarray:
    """Sign(block_size=64), which sees the weight only."""
    flat = x.reshape(-1, 64)
    scale = np.abs(flat).mean(1, keepdims=True)
    return np.where(flat >= 0, scale, -scale).reshape(x.shape)


def largest(x: np.ndarray) -> np.ndarray:
    """TopK(density=0.05, value_bits=32)."""
    kept = np.zeros_like(x)
    places = np.argsort(-np.abs(x).ravel())[:32]
    kept.ravel()[places] = x.ravel()[places]
    return kept


class Client:
    """What a client keeps in the references: a residual, and the state of its inner optimizer."""

    def __init__(self) -> None:
        self.residual = {n: np.zeros(s) for n, s in SHAPES.items()}
        self.state: dict[str, Any] = {n: np.zeros(s) for n, s in SHAPES.items()}
        self.steps = 0

    def message(
        self, name: str, delta: np.ndarray, compress: Callable[[np.ndarray], np.ndarray] | None
    ) -> np.ndarray:
        if compress is None or name == "bias":  # one-dimensional: never compressed
            return delta
        sent = compress(delta + self.residual[name])
        self.residual[name] = delta + self.residual[name] - sent
        return sent
