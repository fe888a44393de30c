"""What tests of optimizers that own the exchange share: a small problem, skips, resumes."""

import io
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import nn

from comm_hooks.optim.exchanging import ExchangingOptimizer

Make = Callable[..., ExchangingOptimizer]
# Compressed from 16 elements on: two of one length, one of another, and one exempt.
SHAPES = {"weight": (16, 20), "bias": (9,), "other": (12, 15), "third": (32, 10)}
MIN_NUMEL = 16
# Of the learning rate, per step: where it is applied matters only if it changes.
LR_DECAY = 0.97


def draw(name: str, *what: int) -> np.ndarray:
    return np.random.default_rng([*name.encode(), *what]).normal(size=SHAPES[name])


def start(name: str) -> np.ndarray:
    return draw(name)


def gradient(name: str, step: int, rank: int) -> np.ndarray:
    """A signal that all ranks share, and noise of their own."""
    return draw(name, 0) + draw(name, 1, step, rank)


def fresh(dtype: torch.dtype = torch.float32) -> dict[str, nn.Parameter]:
    return {name: nn.Parameter(torch.from_numpy(start(name)).to(dtype)) for name in SHAPES}


def advance(
    optimizer: ExchangingOptimizer, parameters: dict[str, nn.Parameter], steps: Iterable[int]
) -> None:
    for step in steps:
        for name, parameter in parameters.items():
            values = torch.from_numpy(gradient(name, step, dist.get_rank()))
            parameter.grad = values.to(parameter.dtype)
        optimizer.step()


def train(make: Make, options: dict[str, Any], steps: int) -> dict[str, np.ndarray]:
    parameters = fresh()
    optimizer = make(parameters.items(), **options)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, LR_DECAY)
    for step in range(steps):
        advance(optimizer, parameters, [step])
        scheduler.step()
    return {name: p.detach().numpy() for name, p in parameters.items()}


def largest(x: np.ndarray, count: int) -> np.ndarray:
    """Keep the largest elements of a vector."""
    kept = np.zeros_like(x)
    places = np.argsort(-np.abs(x), kind="stable")[:count]
    kept[places] = x[places]
    return kept


def largest_of_blocks(x: np.ndarray, density: float, block_size: int) -> np.ndarray:
    """What TopK's docstring says, in NumPy."""
    count = -(-x.size // block_size)
    size = -(-x.size // count)
    blocks = [x[first : first + size] for first in range(0, x.size, size)]
    return np.concatenate([largest(b, int(np.ceil(density * size))) for b in blocks])


class Mean:
    """The exchange of one parameter with error feedback, on all ranks at once, in NumPy."""

    def __init__(
        self,
        compress: Callable[[np.ndarray], np.ndarray],
        ranks: int,
        *,
        sharded: bool = False,
        decay: float = 1.0,
    ) -> None:
        self.compress, self.ranks, self.sharded, self.decay = compress, ranks, sharded, decay
        self.errors: list[Any] = [0.0] * ranks
        self.server_errors: list[Any] = [0.0] * ranks

    def __call__(self, vectors: list[np.ndarray]) -> np.ndarray:
        vectors = [v + self.decay * e for v, e in zip(vectors, self.errors, strict=True)]
        sent = [
            np.concatenate([self.compress(shard) for shard in self.shards(vector)])
            for vector in vectors
        ]
        self.errors = [v - s for v, s in zip(vectors, sent, strict=True)]
        mean = np.mean(sent, axis=0)
        if not self.sharded:
            return mean
        owned = [
            m + self.decay * e for m, e in zip(self.shards(mean), self.server_errors, strict=True)
        ]
        again = [self.compress(shard) for shard in owned]
        self.server_errors = [o - a for o, a in zip(owned, again, strict=True)]
        return np.concatenate(again)

    def shards(self, vector: np.ndarray) -> list[np.ndarray]:
        return np.split(vector, self.ranks) if self.sharded else [vector]


def snapshot(optimizer: ExchangingOptimizer, parameters: dict[str, nn.Parameter]) -> Any:
    """Return everything that a skipped step must leave as it was."""
    state_dict = optimizer.exchange.state_dict()
    exchange = {k: v for k, v in state_dict.items() if k not in ("step", "run", "seal")}
    state = [parameters, optimizer.state_dict()["state"], exchange]
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


def equal(a: Any, b: Any) -> bool:
    if isinstance(a, torch.Tensor):
        return a.dtype == b.dtype and torch.equal(a, b)
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(equal(a[key], b[key]) for key in a)
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(map(equal, a, b))
    return bool(a == b)


def skip(make: Make, options: dict[str, Any], poison: float) -> tuple[bool, bool, float]:
    """Take steps of which one meets a gradient that is not finite, on the last rank.

    Return whether that one changed nothing, whether the next did something, and a checksum.
    """
    parameters = fresh()
    optimizer = make(parameters.items(), **options)
    advance(optimizer, parameters, range(3))
    before = snapshot(optimizer, parameters)
    for name, parameter in parameters.items():
        parameter.grad = torch.from_numpy(gradient(name, 3, dist.get_rank())).float()
    if dist.get_rank() == dist.get_world_size() - 1:
        grad = parameters["other"].grad
        assert grad is not None
        grad[3, 3] = poison
    optimizer.step()
    skipped = snapshot(optimizer, parameters)
    advance(optimizer, parameters, range(4, 6))
    moved = all(not torch.equal(before[0][n], p) for n, p in parameters.items())
    return equal(before, skipped), moved, float(sum(p.double().sum() for p in parameters.values()))


def resume(make: Make, options: dict[str, Any], dtype: torch.dtype) -> bool:
    """Return whether a run that is saved, loaded and continued ends as one that is not."""
    parameters = fresh(dtype)
    optimizer = make(parameters.items(), **options)
    advance(optimizer, parameters, range(5))
    file = io.BytesIO()
    state = [dict(parameters), optimizer.state_dict(), optimizer.exchange.state_dict()]
    torch.save(state, file)
    advance(optimizer, parameters, range(5, 9))
    file.seek(0)
    saved = torch.load(file, weights_only=True)
    again = {name: nn.Parameter(value) for name, value in saved[0].items()}
    resumed = make(again.items(), **options)
    resumed.load_state_dict(saved[1])
    resumed.exchange.load_state_dict(saved[2])
    advance(resumed, again, range(5, 9))
    return equal(snapshot(optimizer, parameters), snapshot(resumed, again))
