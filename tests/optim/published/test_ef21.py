"""EF21 against an independent NumPy reference, and against SGD, on real ranks."""

from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn

from comm_hooks import Differences, ErrorFeedback, Exchange
from comm_hooks.optim.published.ef21 import EF21
from tests.optim.references import OPERATORS, Estimate, Exact, Operator
from tests.optim.replicas import MIN_NUMEL, SHAPES, gradient, start
from tests.optim.scenarios import RanksOf, Values, history, rarely, same

STEPS = 30
LR, DECAY = 0.02, 0.1


def make(params: Any, operator: str = "topk", sharded: bool = False, momentum: float = 0.9) -> EF21:
    exchange = Exchange(
        OPERATORS[operator][0],
        Differences(),
        "sharded" if sharded else "all_gather",
        min_numel=MIN_NUMEL,
    )
    return EF21(params, exchange, lr=LR, momentum=momentum, weight_decay=DECAY)


def reference(compress: Operator, ranks: int, sharded: bool, momentum: float) -> Values:
    """The docstring's algorithm, in float64 and without any of the library."""
    results = {}
    for name in SHAPES:
        x = start(name).ravel()
        b = np.zeros_like(x)
        estimate = Exact() if name == "bias" else Estimate(compress, ranks, sharded=sharded)
        for step in range(STEPS):
            g = estimate([gradient(name, step, rank).ravel() for rank in range(ranks)])
            b = momentum * b + g
            x = (1 - LR * DECAY) * x - LR * b
        results[name] = x.reshape(SHAPES[name])
    return results


@pytest.mark.parametrize("momentum", [0.0, 0.9])
@pytest.mark.parametrize("sharded", [False, True])
@pytest.mark.parametrize("operator", ["topk", *rarely("identity", "sign")])
def test_matches_the_reference(
    ranks_of: RanksOf, operator: str, sharded: bool, momentum: float
) -> None:
    options = {"operator": operator, "sharded": sharded, "momentum": momentum}
    histories = ranks_of(2).run(history, make, options, STEPS)
    for replica, other in zip(*histories, strict=True):
        assert same(replica, other), "replicas must not drift"
    expected = reference(OPERATORS[operator][1], 2, sharded, momentum)
    for name in SHAPES:
        # 30 float32 steps of the order of 0.02, times 10 with momentum
        np.testing.assert_allclose(histories[0][-1][name], expected[name], rtol=1e-5, atol=1e-4)


def descend(memory: str) -> float:
    """Minimize the mean of the ranks' quadratics, which pull apart; return the distance left."""
    generator = torch.Generator().manual_seed(5)
    centers = torch.randn(2, 16, 40, generator=generator)
    curvatures = torch.rand(2, 16, 40, generator=generator) + 0.5
    best = (curvatures * centers).sum(0) / curvatures.sum(0)
    x = nn.Parameter(torch.zeros(16, 40))
    rank = dist.get_rank()
    optimizer: torch.optim.Optimizer
    if memory == "differences":
        exchange = Exchange(OPERATORS["topk"][0], Differences(), min_numel=MIN_NUMEL)
        optimizer = EF21([("x", x)], exchange, lr=0.05)
    else:
        exchange = Exchange(OPERATORS["topk"][0], ErrorFeedback(), min_numel=MIN_NUMEL)
        optimizer = torch.optim.SGD([x], lr=0.05)
    for _ in range(500):
        x.grad = curvatures[rank] * (x.detach() - centers[rank])
        if memory == "feedback":
            exchange.average_({"x": x.grad})
        optimizer.step()
    return float((x.detach() - best).norm() / best.norm())


@pytest.mark.slow
def test_a_constant_rate_reaches_the_minimum_where_error_feedback_does_not(
    ranks_of: RanksOf,
) -> None:
    """The point of the paper: with clients that disagree, error feedback ends in a neighborhood."""
    ours = ranks_of(2).run(descend, "differences")
    theirs = ranks_of(2).run(descend, "feedback")
    assert max(ours) < 1e-4
    assert min(theirs) > 1e-2
