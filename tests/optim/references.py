"""NumPy references that tests of several optimizers share, beside those of ``replicas``."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from comm_hooks import Identity, Sign, TopK
from comm_hooks.compressors import Compressor
from tests.optim.replicas import Mean, largest_of_blocks

Operator = Callable[[np.ndarray], np.ndarray]


def check(
    replicas: Sequence[Mapping[str, np.ndarray]], expected: Mapping[str, np.ndarray], *, atol: float
) -> None:
    """Assert that replicas are equal, bit for bit, and within rounding of the reference.

    A NaN in the reference stands for a value that depends on rounding.
    """
    for replica in replicas:
        for name, value in expected.items():
            assert np.array_equal(replica[name], replicas[0][name]), "replicas must not drift"
            clear = ~np.isnan(value)
            assert clear.mean() > 0.99
            np.testing.assert_allclose(replica[name][clear], value[clear], atol=atol)


def sign_of_blocks(x: np.ndarray, block_size: int) -> np.ndarray:
    """What Sign's docstring says, in NumPy."""
    blocks = [x[first : first + block_size] for first in range(0, x.size, block_size)]
    return np.concatenate([np.abs(b).mean() * np.where(b >= 0, 1, -1) for b in blocks])


# Compressors, and what they do to a vector.
OPERATORS: dict[str, tuple[Compressor, Operator]] = {
    "identity": (Identity(), lambda x: x),
    "sign": (Sign(block_size=64), lambda x: sign_of_blocks(x, 64)),
    "topk": (
        TopK(density=0.05, block_size=200, value_bits=32),
        lambda x: largest_of_blocks(x, 0.05, 200),
    ),
}


class Exact:
    """The exchange of a parameter that is exempt from compression."""

    def __call__(self, vectors: list[np.ndarray]) -> np.ndarray:
        return np.mean(vectors, axis=0)


class PublishedMean(Mean):
    """The exchange of one parameter as DeepSpeed 0.19.6 has it (``compressed_allreduce``).

    A rank's payload has one scale, an owner's payload another, both root mean squares.
    """

    def __call__(self, vectors: list[np.ndarray]) -> np.ndarray:
        sent = []
        for rank, vector in enumerate(vectors):
            compensated = vector + self.errors[rank]
            sent.append(sign_of_rms(compensated))
            self.errors[rank] = compensated - sent[rank]
        result = []
        for owner, chunk in enumerate(np.split(np.mean(sent, axis=0), len(vectors))):
            compensated = chunk + self.server_errors[owner]
            result.append(sign_of_rms(compensated))
            self.server_errors[owner] = compensated - result[owner]
        return np.concatenate(result)


def sign_of_rms(x: np.ndarray) -> np.ndarray:
    return np.linalg.norm(x) / np.sqrt(x.size) * np.where(x >= 0, 1, -1)


class Estimate(Mean):
    """CD-Adam's compression of differences, on all ranks at once; returns what the servers sent.

    In the words of its Algorithm 1: the servers keep two estimates instead of a residual.
    """

    def __init__(self, compress: Operator, ranks: int, *, sharded: bool) -> None:
        super().__init__(compress, ranks, sharded=sharded)
        self.ranks_estimates: list[Any] = [0.0] * ranks
        self.server_estimate: Any = 0.0
        self.sent: Any = 0.0

    def __call__(self, vectors: list[np.ndarray]) -> np.ndarray:
        changes = [self.pieces(v - h) for v, h in zip(vectors, self.ranks_estimates, strict=True)]
        self.ranks_estimates = [h + c for h, c in zip(self.ranks_estimates, changes, strict=True)]
        self.server_estimate = self.server_estimate + np.mean(changes, axis=0)
        if self.sharded:
            self.sent = self.sent + self.pieces(self.server_estimate - self.sent)
        else:
            self.sent = self.server_estimate
        return self.sent

    def pieces(self, vector: np.ndarray) -> np.ndarray:
        return np.concatenate([self.compress(shard) for shard in self.shards(vector)])
