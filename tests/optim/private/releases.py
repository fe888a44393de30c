"""A made-up private run: the same in torch, through the library's clipping, and in NumPy.

Every step has its own number of samples, in one case none; their gradients depend on the
parameters, and one of them is huge.  The noise is given.
"""

from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
import torch
from torch import nn

from comm_hooks.optim.private.gradients.clipping import SampleClipper
from comm_hooks.optim.private.optimizers.descent import NoisedOptimizer

SHAPES = {"weight": (6, 5), "bias": (7,)}
STEPS = 30
BATCH = 4
NORM = 1.5
SIGMA = 0.3

Values = dict[str, np.ndarray]
Transform = Callable[[str, np.ndarray], np.ndarray]


def start(name: str) -> np.ndarray:
    return np.random.default_rng(len(name)).normal(size=SHAPES[name])


def samples(name: str, step: int, theta: np.ndarray, data: int = 0) -> np.ndarray:
    """Return one gradient per sample; none in step 7 (of data 0), a huge one in step 11."""
    rng = np.random.default_rng([len(name), step, 1, data])
    count = 0 if (step, data) == (7, 0) else (step + data) % 4 + 1
    size = np.geomspace(0.05, 2.0, theta.size).reshape(theta.shape)
    gradients = size * rng.normal(size=(count, *theta.shape)) + 0.2 * theta
    if step == 11:
        gradients[0] *= 1e3
    # From the first on they are shorter and shorter, so that only some are clipped.
    return gradients * 0.1 ** np.arange(count).reshape(-1, *[1] * theta.ndim)


def public_gradient(name: str, step: int, theta: np.ndarray) -> np.ndarray:
    rng = np.random.default_rng([len(name), step, 2])
    size = np.geomspace(0.05, 2.0, theta.size).reshape(theta.shape)
    return size * rng.normal(size=theta.shape) + 0.2 * theta


def noise(name: str, step: int) -> np.ndarray:
    rng = np.random.default_rng([len(name), step, 3])
    return SIGMA * NORM * rng.normal(size=SHAPES[name])


def privatized(step: int, theta: Values, transform: Transform, norm: float = NORM) -> Values:
    """Return (sum_i clip(transform(g_i), norm) + noise) / B in float64.

    The noise is that for NORM, times norm / NORM.
    """
    gradients = {n: transform(n, samples(n, step, theta[n])) for n in SHAPES}
    squares = sum((g**2).sum(tuple(range(1, g.ndim))) for g in gradients.values())
    factors = np.minimum(1, norm / np.sqrt(np.maximum(squares, 1e-30)))
    return {
        n: (np.tensordot(factors, g, 1) + noise(n, step) * norm / NORM) / BATCH
        for n, g in gradients.items()
    }


def unchanged(name: str, gradients: np.ndarray) -> np.ndarray:
    return gradients


class Given(SampleClipper):
    """Clips the gradients of this module."""

    def __init__(self, parameters: dict[str, nn.Parameter], data: int = 0) -> None:
        super().__init__(list(parameters.values()), NORM)
        self._named = parameters
        self._data = data

    def backward(self, step: int, read: Any = None) -> torch.Tensor:
        self._add_samples(
            [
                torch.tensor(samples(name, step, p.detach().double().numpy(), self._data))
                for name, p in self._named.items()
            ]
        )
        return torch.zeros(())


class Public:
    """Public gradients of one step after the other."""

    def __init__(self, parameters: dict[str, nn.Parameter]) -> None:
        self._parameters = parameters
        self.calls = 0

    def __call__(self) -> dict[str, torch.Tensor]:
        self.calls += 1
        return {
            name: torch.tensor(public_gradient(name, self.calls - 1, p.detach().double().numpy()))
            for name, p in self._parameters.items()
        }


Make = Callable[[dict[str, nn.Parameter]], torch.optim.Optimizer]


def fresh(dtype: torch.dtype = torch.float32) -> dict[str, nn.Parameter]:
    return {name: nn.Parameter(torch.tensor(start(name), dtype=dtype)) for name in SHAPES}


def advance(
    parameters: dict[str, nn.Parameter],
    optimizer: torch.optim.Optimizer,
    steps: Iterable[int] = range(STEPS),
    data: int = 0,
) -> list[Any]:
    """Take steps as the engine does; return their transforms."""
    gradients = Given(parameters, data)
    transforms = []
    for step in steps:
        if isinstance(optimizer, NoisedOptimizer):
            gradients.transform = optimizer.transform()
            transforms.append(gradients.transform)
        gradients.backward(step)
        sums = gradients.take().tensors
        for (name, parameter), total in zip(parameters.items(), sums, strict=True):
            noised = (total + torch.tensor(noise(name, step)).float()) / BATCH
            parameter.grad = noised.to(parameter.dtype)
        optimizer.step()
    return transforms


def trained(make: Make) -> Values:
    """Return the parameters after all steps."""
    parameters = fresh()
    advance(parameters, make(parameters))
    return {name: p.detach().numpy() for name, p in parameters.items()}


def assert_close(actual: Values, expected: Values) -> None:
    for name in SHAPES:
        # The library clips to 2^-16 less, in float32.
        np.testing.assert_allclose(actual[name], expected[name], rtol=2e-4, atol=2e-4)
