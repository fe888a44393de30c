"""CocktailSGD against NumPy, on real ranks."""

from typing import Any

import numpy as np
import pytest

from comm_hooks import ErrorFeedback, Exchange, TopK
from comm_hooks.compressors.cocktail import Cocktail
from comm_hooks.optim.published.cocktail_sgd import CocktailSGD
from tests.optim.references import check
from tests.optim.replicas import (
    LR_DECAY,
    MIN_NUMEL,
    SHAPES,
    Mean,
    gradient,
    largest_of_blocks,
    start,
    train,
)
from tests.optim.scenarios import RanksOf, rarely

STEPS, SEED, DENSITY, BLOCK = 30, 2, 0.1, 64
HYPER = {"lr": 1e-2, "weight_decay": 0.1}
COCKTAIL = Cocktail(mask=0.5, density=0.2, value_bits=4, block_size=32)


def make(params: Any, compressor: Any = COCKTAIL, **hyper: Any) -> CocktailSGD:
    exchange = Exchange(compressor, ErrorFeedback(), "sharded", SEED, min_numel=MIN_NUMEL)
    return CocktailSGD(params, exchange, **{**HYPER, **hyper})


def reference(ranks: int, momentum: float, delayed: bool) -> dict[str, np.ndarray]:
    """The docstring's algorithm, in float64, with TopK for C."""
    results = {}
    for name in SHAPES:
        x = start(name).ravel()
        is_exempt = len(SHAPES[name]) == 1
        mean = Mean(
            (lambda v: v) if is_exempt else (lambda v: largest_of_blocks(v, DENSITY, BLOCK)),
            ranks,
            sharded=not is_exempt,
        )
        u, aggregates = np.zeros_like(x), [np.zeros_like(x)]
        for step in range(STEPS):
            aggregates.append(mean([gradient(name, step, r).ravel() for r in range(ranks)]))
            u = momentum * u + aggregates[-2 if delayed else -1]
            lr = HYPER["lr"] * LR_DECAY**step
            x = x * (1 - lr * HYPER["weight_decay"]) - lr * u
        results[name] = x.reshape(SHAPES[name])
    return results


@pytest.mark.parametrize("ranks", [2, *rarely(1)])
@pytest.mark.parametrize(
    ("momentum", "delayed"), [(0.0, False), (0.9, True), *rarely((0.0, True), (0.9, False))]
)
@pytest.mark.filterwarnings("ignore:world size is 1")
def test_matches_the_reference(
    ranks_of: RanksOf, ranks: int, momentum: float, delayed: bool
) -> None:
    options = {
        "compressor": TopK(DENSITY, BLOCK, 32),
        "momentum": momentum,
        "delayed": delayed,
    }
    replicas = ranks_of(ranks).run(train, make, options, STEPS)
    expected = reference(ranks, momentum, delayed)
    check(replicas, expected, atol=2e-5)
