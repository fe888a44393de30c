"""CocktailSGD against NumPy, on real ranks."""

from typing import Any

import numpy as np
import pytest
import torch

from comm_hooks import ErrorFeedback, Exchange, TopK
from comm_hooks.compressors.cocktail import Cocktail
from comm_hooks.optim.published.cocktail_sgd import CocktailSGD
from comm_hooks.randomness import derive_key, fork
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
@pytest.mark.parametrize("momentum", [0.0, 0.9])
@pytest.mark.parametrize("delayed", [False, True])
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


def with_cocktail() -> dict[str, np.ndarray]:
    """The same with Cocktail, whose random numbers are asked of the library."""
    results = {}
    for name in SHAPES:
        x = start(name).ravel()
        errors, server_errors = [np.zeros_like(x)] * 2, [np.zeros(x.size // 2)] * 2
        for step in range(STEPS):
            keys = [derive_key(SEED, step, name)]

            def compress(shard: np.ndarray, stream: int, keys: list[int] = keys) -> np.ndarray:
                (key,) = fork(keys, stream)
                vector = torch.from_numpy(shard)
                payload = COCKTAIL.compress(vector, key=key)
                return COCKTAIL.decompress(payload, shard.size, key=key).double().numpy()

            gs = [gradient(name, step, rank).ravel() for rank in range(2)]
            if name == "bias":
                mean = np.mean(gs, axis=0)
            else:
                inputs = [g + e for g, e in zip(gs, errors, strict=True)]
                sent = [
                    np.concatenate([compress(s, i) for i, s in enumerate(np.split(v, 2))])
                    for v in inputs
                ]
                errors = [i - s for i, s in zip(inputs, sent, strict=True)]
                shards = np.split(np.mean(sent, axis=0), 2)
                owned = [s + e for s, e in zip(shards, server_errors, strict=True)]
                again = [compress(shard, 2 + i) for i, shard in enumerate(owned)]
                server_errors = [o - a for o, a in zip(owned, again, strict=True)]
                mean = np.concatenate(again)
            lr = HYPER["lr"] * LR_DECAY**step
            x = x * (1 - lr * HYPER["weight_decay"]) - lr * mean
        results[name] = x.reshape(SHAPES[name])
    return results


def test_cocktail_goes_both_ways(ranks_of: RanksOf) -> None:
    replicas = ranks_of(2).run(train, make, {}, STEPS)
    expected = with_cocktail()
    for replica in replicas:
        for name in SHAPES:
            assert np.array_equal(replica[name], replicas[0][name]), "replicas must not drift"
            # A value on the border of two levels may be rounded to the other one in float32;
            # the residual makes up for it.
            assert np.isclose(replica[name], expected[name], atol=2e-5).mean() > 0.95
            np.testing.assert_allclose(replica[name], expected[name], atol=2e-3)
