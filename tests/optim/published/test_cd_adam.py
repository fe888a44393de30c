"""CDAdam against an independent NumPy reference, and against AMSGrad, on real ranks."""

from typing import Any

import numpy as np
import pytest
import torch.distributed as dist

from comm_hooks import Differences, Exchange
from comm_hooks.optim.published.ef21 import CDAdam
from tests.optim.references import OPERATORS, Estimate, Exact, Operator, check
from tests.optim.replicas import MIN_NUMEL, SHAPES, advance, fresh, gradient, start
from tests.optim.scenarios import RanksOf, Values, history, rarely

STEPS = 30
HYPER = {"lr": 1e-2, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1}


def make(
    params: Any, operator: str = "sign", sharded: bool = True, bias_correction: bool = False
) -> CDAdam:
    exchange = Exchange(
        OPERATORS[operator][0],
        Differences(),
        "sharded" if sharded else "all_gather",
        min_numel=MIN_NUMEL,
    )
    return CDAdam(params, exchange, bias_correction=bias_correction, **HYPER)


def reference(compress: Operator, ranks: int, sharded: bool, bias_correction: bool) -> Values:
    """The docstring's algorithm, in float64 and without any of the library."""
    lr, (beta1, beta2), decay = HYPER["lr"], HYPER["betas"], HYPER["weight_decay"]
    results = {}
    for name in SHAPES:
        x = start(name).ravel()
        m, v, largest = (np.zeros_like(x) for _ in range(3))
        estimate = Exact() if name == "bias" else Estimate(compress, ranks, sharded=sharded)
        for step in range(STEPS):
            g = estimate([gradient(name, step, rank).ravel() for rank in range(ranks)])
            m = beta1 * m + (1 - beta1) * g
            v = beta2 * v + (1 - beta2) * g**2
            largest = np.maximum(largest, v)
            c1 = 1 - beta1 ** (step + 1) if bias_correction else 1.0
            c2 = 1 - beta2 ** (step + 1) if bias_correction else 1.0
            x = x - lr * decay * x - lr * (m / c1) / (np.sqrt(largest / c2) + HYPER["eps"])
        results[name] = x.reshape(SHAPES[name])
    return results


@pytest.mark.parametrize(
    ("sharded", "bias_correction"),
    [(False, False), (True, True), *rarely((False, True), (True, False))],
)
@pytest.mark.parametrize("operator", ["sign", *rarely("identity", "topk")])
def test_matches_the_reference(
    ranks_of: RanksOf, operator: str, sharded: bool, bias_correction: bool
) -> None:
    options = {"operator": operator, "sharded": sharded, "bias_correction": bias_correction}
    histories = ranks_of(2).run(history, make, options, STEPS)
    expected = reference(OPERATORS[operator][1], 2, sharded, bias_correction)
    # 30 float32 steps of the order of 0.01
    check([values[-1] for values in histories], expected, atol=1e-4)


def follow(sharded: bool) -> dict[str, float]:
    """Return how far, relatively, the aggregates are from mean gradients that stay the same."""
    parameters = fresh()
    optimizer = make(parameters.items(), "topk", sharded)
    advance(optimizer, parameters, [0] * 90)
    errors = {}
    for name, parameter in parameters.items():
        mean = np.mean([gradient(name, 0, r) for r in range(dist.get_world_size())], axis=0)
        error = optimizer.state[parameter]["aggregate"].numpy() - mean
        errors[name] = float(np.linalg.norm(error) / np.linalg.norm(mean))
    return errors


@pytest.mark.parametrize("sharded", [False, *rarely(True)])
def test_the_aggregate_finds_gradients_that_stay(ranks_of: RanksOf, sharded: bool) -> None:
    for errors in ranks_of(2).run(follow, sharded):
        assert max(errors.values()) < 1e-5
