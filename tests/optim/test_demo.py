"""DeMo against NumPy, on real ranks."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from comm_hooks import ErrorFeedback, Exchange, TopK
from comm_hooks.compressors import Compressor
from comm_hooks.compressors.dct import DCTTopK
from comm_hooks.memory import MomentumCorrection
from comm_hooks.optim.demo import DeMo
from tests.optim.replicas import (
    LR_DECAY,
    MIN_NUMEL,
    SHAPES,
    Mean,
    gradient,
    largest,
    largest_of_blocks,
    resume,
    skip,
    start,
    train,
)
from tests.optim.test_compressed_adam import RanksOf

STEPS, CHUNK, DENSITY, DECAY = 30, 8, 0.1, 0.99
HYPER = {"lr": 1e-2, "weight_decay": 0.1}


def make(params: Any, compressor: Compressor) -> DeMo:
    memory = ErrorFeedback(decay=DECAY)
    return DeMo(params, Exchange(compressor, memory, "all_gather", min_numel=MIN_NUMEL), **HYPER)


def largest_frequencies(x: np.ndarray) -> np.ndarray:
    """Keep the largest DCT-II coefficients of every CHUNK x CHUNK piece of a vector."""
    n = np.arange(CHUNK)
    dct = np.sqrt(2 / CHUNK) * np.cos(np.pi / (2 * CHUNK) * np.outer(n, 2 * n + 1))
    dct[0] /= np.sqrt(2)
    padded = np.pad(x, (0, -x.size % CHUNK**2)).reshape(-1, CHUNK, CHUNK)
    kept = [
        largest((dct @ square @ dct.T).ravel(), int(np.ceil(DENSITY * CHUNK**2))).reshape(
            CHUNK, CHUNK
        )
        for square in padded
    ]
    return np.concatenate([(dct.T @ square @ dct).ravel() for square in kept])[: x.size]


def reference(
    compress: Callable[[np.ndarray], np.ndarray], ranks: int
) -> tuple[dict[str, np.ndarray], dict[str, np.ndarray]]:
    """The docstring's algorithm, in float64, and the least |mean| of each element's that moved."""
    results, smallest = {}, {}
    for name in SHAPES:
        x = start(name).ravel()
        is_exempt = len(SHAPES[name]) == 1
        mean_of = Mean((lambda v: v) if is_exempt else compress, ranks, decay=DECAY)
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


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize(
    ("compressor", "compress"),
    [
        (TopK(DENSITY, 64, 32), lambda v: largest_of_blocks(v, DENSITY, 64)),
        (DCTTopK(CHUNK, DENSITY, 32), largest_frequencies),
    ],
    ids=["topk", "dct"],
)
@pytest.mark.filterwarnings("ignore:world size is 1")
def test_matches_the_reference(
    ranks_of: RanksOf,
    compressor: Compressor,
    compress: Callable[[np.ndarray], np.ndarray],
    ranks: int,
) -> None:
    replicas = ranks_of(ranks).run(train, make, {"compressor": compressor}, STEPS)
    expected, smallest = reference(compress, ranks)
    for replica in replicas:
        for name in SHAPES:
            assert np.array_equal(replica[name], replicas[0][name]), "replicas must not drift"
            # Where a mean is next to zero its sign is not the same in float32.
            clear = smallest[name] > 1e-5
            assert clear.mean() > 0.99
            np.testing.assert_allclose(replica[name][clear], expected[name][clear], atol=2e-5)


@pytest.mark.parametrize("poison", [float("nan"), float("inf")])
def test_a_bad_gradient_on_one_rank_skips_the_step_on_all(ranks_of: RanksOf, poison: float) -> None:
    outcomes = ranks_of(2).run(skip, make, {"compressor": DCTTopK(CHUNK, 0.5)}, poison)
    unchanged, moved, total = outcomes[0]
    assert unchanged
    assert moved
    assert outcomes[0] == outcomes[1]
    assert np.isfinite(total)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_resumed_run_ends_as_one_that_was_not_interrupted(
    ranks_of: RanksOf, dtype: torch.dtype
) -> None:
    assert all(ranks_of(2).run(resume, make, {"compressor": DCTTopK(CHUNK, DENSITY)}, dtype))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"lr": -1.0}, "lr must not be negative"),
        ({"weight_decay": float("inf")}, "weight_decay must be finite"),
        ({"exchange": TopK()}, "exchange must be an Exchange"),
        ({"exchange": Exchange(TopK())}, "the momentum is the exchange's residual"),
        ({"exchange": Exchange(TopK(), MomentumCorrection())}, "not MomentumCorrection"),
    ],
    ids=str,
)
def test_what_cannot_work_is_refused(options: dict[str, Any], message: str) -> None:
    arguments = {"exchange": Exchange(DCTTopK(), ErrorFeedback(decay=0.999))} | options
    with pytest.raises(ValueError, match=message):
        DeMo([nn.Parameter(torch.zeros(2))], **arguments)
