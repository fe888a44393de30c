"""DeMo against NumPy, on real ranks."""

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn

from comm_hooks import ErrorFeedback, Exchange, TopK
from comm_hooks.compressors import Compressor
from comm_hooks.compressors.dct import DCTTopK
from comm_hooks.optim.published import demo
from comm_hooks.optim.published.demo import DeMo
from comm_hooks.randomness import Draw
from tests.optim.replicas import (
    LR_DECAY,
    MIN_NUMEL,
    SHAPES,
    Mean,
    gradient,
    largest,
    largest_of_blocks,
    start,
    train,
)
from tests.optim.scenarios import RanksOf, rarely

STEPS, CHUNK, DENSITY, DECAY = 30, 8, 0.1, 0.99
HYPER = {"lr": 1e-2, "weight_decay": 0.1}


def make(params: Any, compressor: Compressor, mean: str = "senders", **exchange: Any) -> DeMo:
    memory = ErrorFeedback(decay=DECAY)
    settings = {"collective": "all_gather", "min_numel": MIN_NUMEL, **exchange}
    return DeMo(params, Exchange(compressor, memory, **settings), mean=mean, **HYPER)


N = np.arange(CHUNK)
DCT = np.sqrt(2 / CHUNK) * np.cos(np.pi / (2 * CHUNK) * np.outer(N, 2 * N + 1))
DCT[0] /= np.sqrt(2)


def coefficients(x: np.ndarray) -> np.ndarray:
    """The DCT-II coefficients of the CHUNK x CHUNK pieces of a vector."""
    padded = np.pad(x, (0, -x.size % CHUNK**2)).reshape(-1, CHUNK, CHUNK)
    return DCT @ padded @ DCT.T


def elements(coefficients: np.ndarray, numel: int) -> np.ndarray:
    return (DCT.T @ coefficients @ DCT).ravel()[:numel]


def largest_coefficients(x: np.ndarray) -> np.ndarray:
    """Keep the largest coefficients of every piece."""
    count = int(np.ceil(DENSITY * CHUNK**2))
    kept = [largest(square.ravel(), count) for square in coefficients(x)]
    return np.reshape(kept, (-1, CHUNK, CHUNK))


def largest_frequencies(x: np.ndarray) -> np.ndarray:
    return elements(largest_coefficients(x), x.size)


class MeanOfSenders(Mean):
    """Averages every coefficient over the ranks that sent it."""

    def __call__(self, vectors: list[np.ndarray]) -> np.ndarray:
        vectors = [v + self.decay * e for v, e in zip(vectors, self.errors, strict=True)]
        sent = np.stack([largest_coefficients(vector) for vector in vectors])
        self.errors = [v - elements(s, v.size) for v, s in zip(vectors, sent, strict=True)]
        senders = np.maximum(1, (sent != 0).sum(axis=0))
        return elements(sent.sum(axis=0) / senders, vectors[0].size)


def reference(
    compress: Callable[[np.ndarray], np.ndarray], ranks: int, kind: type[Mean]
) -> tuple[dict[str, np.ndarray], dict[str, np.ndarray]]:
    """The docstring's algorithm, in float64, and the least |mean| of each element's that moved."""
    results, smallest = {}, {}
    for name in SHAPES:
        x = start(name).ravel()
        is_exempt = len(SHAPES[name]) == 1
        mean_of = (
            Mean(lambda v: v, ranks, decay=DECAY)
            if is_exempt
            else kind(compress, ranks, decay=DECAY)
        )
        least = np.full_like(x, np.inf)
        for step in range(STEPS):
            mean = mean_of([gradient(name, step, rank).ravel() for rank in range(ranks)])
            mean[np.abs(mean) < 1e-12] = 0
            least = np.minimum(least, np.where(mean == 0, np.inf, np.abs(mean)))
            lr = HYPER["lr"] * LR_DECAY**step
            x = x * (1 - lr * HYPER["weight_decay"]) - lr * np.sign(mean)
        results[name] = x.reshape(SHAPES[name])
        smallest[name] = least.reshape(SHAPES[name])
    return results, smallest


@pytest.mark.parametrize("ranks", [2, *rarely(1, 3)])
@pytest.mark.parametrize(
    ("compressor", "compress", "mean", "kind"),
    [
        (TopK(DENSITY, 64, 32), lambda v: largest_of_blocks(v, DENSITY, 64), "senders", Mean),
        (DCTTopK(CHUNK, DENSITY, 32), largest_frequencies, "ranks", Mean),
        (DCTTopK(CHUNK, DENSITY, 32), largest_frequencies, "senders", MeanOfSenders),
    ],
    ids=["topk", "dct", "dct_senders"],
)
@pytest.mark.filterwarnings("ignore:world size is 1")
def test_matches_the_reference(
    ranks_of: RanksOf,
    compressor: Compressor,
    compress: Callable[[np.ndarray], np.ndarray],
    mean: str,
    kind: type[Mean],
    ranks: int,
) -> None:
    replicas = ranks_of(ranks).run(train, make, {"compressor": compressor, "mean": mean}, STEPS)
    expected, smallest = reference(compress, ranks, kind)
    for replica in replicas:
        for name in SHAPES:
            assert np.array_equal(replica[name], replicas[0][name]), "replicas must not drift"
            # Where a mean is next to zero its sign is not the same in float32.
            clear = smallest[name] > 1e-5
            assert clear.mean() > 0.99
            np.testing.assert_allclose(replica[name][clear], expected[name][clear], atol=2e-5)


def first_signs(mean: str, **exchange: Any) -> np.ndarray:
    """The signs of a first step, where a fifth of the gradient's variance is shared."""
    torch.manual_seed(dist.get_rank())
    noise = torch.randn(256, 256)
    shared = torch.randn(256, 256, generator=torch.Generator().manual_seed(99))
    weight = nn.Parameter(torch.zeros(256, 256))
    settings = {"collective": "all_gather", **exchange}
    optimizer = DeMo(
        [weight], Exchange(DCTTopK(), ErrorFeedback(decay=0.999), **settings), lr=1.0, mean=mean
    )
    weight.grad = shared + 2 * noise
    optimizer.step()
    return -weight.detach().numpy()


def test_the_mean_of_senders_is_one() -> None:
    """Also in size, which signs do not see."""
    compressor = demo._MeanOfSenders(CHUNK, 1 / CHUNK**2, 32)
    vectors = [torch.ones(1, CHUNK**2), 3 * torch.ones(1, CHUNK**2), torch.zeros(1, CHUNK**2)]
    payloads = torch.stack([compressor.encode(v, Draw((0,), 0, 3)) for v in vectors])
    out = torch.full((1, CHUNK**2), 7.0)
    compressor.decode_sum(out, payloads, Draw((0,), 0, 3), alpha=1 / 3)
    torch.testing.assert_close(out, 2 * torch.ones(1, CHUNK**2))


@pytest.mark.parametrize("collective", ["sharded", "hierarchical"])
def test_senders_are_counted_on_every_route(ranks_of: RanksOf, collective: str) -> None:
    options: dict[str, Any] = {"collective": collective}
    if collective == "hierarchical":
        options["ranks_per_node"] = 2
    signs = [ranks_of(4).run(partial(first_signs, m, **options)) for m in ("senders", "ranks")]
    for replicas in signs:
        assert all(np.array_equal(replica, replicas[0]) for replica in replicas)
    assert 0.5 < (signs[0][0] == signs[1][0]).mean() < 1
