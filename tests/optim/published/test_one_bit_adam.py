"""OneBitAdam against an independent NumPy reference, on real ranks."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn

from comm_hooks import ErrorFeedback, Exchange, Sign
from comm_hooks.compressors.base import Granularity
from comm_hooks.optim.published.one_bit_adam import OneBitAdam
from tests.optim.references import OPERATORS, Exact, PublishedMean, check
from tests.optim.replicas import (
    MIN_NUMEL,
    SHAPES,
    Mean,
    advance,
    fresh,
    gradient,
    resume,
    start,
)
from tests.optim.scenarios import RanksOf, Values, history, rarely

STEPS, FREEZE = 30, 6
HYPER = {"lr": 1e-2, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1}


PUBLISHED = Sign(block_size=None, scale="rms")


def make(
    params: Any,
    operator: str | Sign = "sign",
    sharded: bool = True,
    freeze_step: int = FREEZE,
    granularity: Granularity = "parameter",
) -> OneBitAdam:
    exchange = Exchange(
        OPERATORS[operator][0] if isinstance(operator, str) else operator,
        ErrorFeedback(),
        "sharded" if sharded else "all_gather",
        min_numel=MIN_NUMEL,
        granularity=granularity,
    )
    return OneBitAdam(params, exchange, freeze_step=freeze_step, **HYPER)


def reference(means: Callable[[], Any], ranks: int, steps: int = STEPS) -> Values:
    """The docstring's algorithm, in float64 and without any of the library."""
    lr, (beta1, beta2), decay = HYPER["lr"], HYPER["betas"], HYPER["weight_decay"]
    results = {}
    for name in SHAPES:
        x = start(name).ravel()
        m, v = np.zeros_like(x), np.zeros_like(x)
        mean = Exact() if name == "bias" else means()
        for step in range(steps):
            gs = [gradient(name, step, rank).ravel() for rank in range(ranks)]
            if step < FREEZE:
                g = np.mean(gs, axis=0)
                m = beta1 * m + (1 - beta1) * g
                v = beta2 * v + (1 - beta2) * g**2
            else:
                m = mean([beta1 * m + (1 - beta1) * g for g in gs])
            x = x - lr * (m / (np.sqrt(v) + HYPER["eps"]) + decay * x)
        results[name] = x.reshape(SHAPES[name])
    return results


@pytest.mark.parametrize("sharded", [False, True])
@pytest.mark.parametrize("operator", ["sign", *rarely("identity", "topk")])
def test_matches_the_reference(ranks_of: RanksOf, operator: str, sharded: bool) -> None:
    options = {"operator": operator, "sharded": sharded}
    histories = ranks_of(2).run(history, make, options, STEPS)
    expected = reference(lambda: Mean(OPERATORS[operator][1], 2, sharded=sharded), 2)
    # 30 float32 steps of the order of 0.01; small v make larger ones
    check([values[-1] for values in histories], expected, atol=1e-4)


@pytest.mark.parametrize("ranks", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_matches_the_published_exchange(ranks_of: RanksOf, ranks: int) -> None:
    """With a scale per tensor from each rank, and a scale per shard back; not with another."""
    steps = 60
    expected = reference(lambda: PublishedMean(ranks), ranks, steps)

    def distance(sign: Sign) -> float:
        """Return how far the parameters are from the reference, in units of how far they moved."""
        ends = ranks_of(ranks).run(history, make, {"operator": sign}, steps)[0][-1]
        names = [name for name in SHAPES if name != "bias"]
        off = np.concatenate([(ends[n] - expected[n]).ravel() for n in names])
        move = np.concatenate([(expected[n] - start(n)).ravel() for n in names])
        return float(np.linalg.norm(off) / np.linalg.norm(move))

    # What float32 rounds in 60 steps.
    assert distance(PUBLISHED) < 1e-5
    assert distance(Sign(block_size=None)) > 0.1


@pytest.mark.parametrize("granularity", ["bucket", *rarely("parameter")])
def test_the_published_exchange_resumes(ranks_of: RanksOf, granularity: Granularity) -> None:
    options = {"operator": PUBLISHED, "freeze_step": 2, "granularity": granularity}
    assert all(ranks_of(2).run(resume, make, options, torch.float32))


def warm_up_and_adam() -> float:
    """Return how far a warm-up is from Adam with its bias correction taken out by the rate."""
    parameters, others = fresh(), fresh()
    beta1, beta2 = HYPER["betas"]
    exchange = Exchange(Sign(), ErrorFeedback())
    ours = OneBitAdam(parameters.items(), exchange, lr=1e-2, betas=(beta1, beta2), freeze_step=20)
    theirs = torch.optim.Adam(others.values(), betas=(beta1, beta2))
    for step in range(20):
        t = step + 1
        theirs.param_groups[0]["lr"] = 1e-2 * (1 - beta1**t) / (1 - beta2**t) ** 0.5
        advance(ours, parameters, [step])
        for name, parameter in others.items():
            local = [gradient(name, step, rank) for rank in range(dist.get_world_size())]
            parameter.grad = torch.from_numpy(np.mean(local, axis=0)).float()
        theirs.step()
    pairs = zip(parameters.values(), others.values(), strict=True)
    return max(float((a - b).abs().max()) for a, b in pairs)


def test_the_warm_up_is_adam_without_bias_correction(ranks_of: RanksOf) -> None:
    assert max(ranks_of(2).run(warm_up_and_adam)) < 1e-5


def move_late_rows(eps: float) -> list[float]:
    """Return how far rows move of which the first has no gradient during the warm-up."""
    table = nn.Parameter(torch.ones(4, 64))
    exchange = Exchange(Sign(block_size=256), ErrorFeedback(), min_numel=MIN_NUMEL)
    optimizer = OneBitAdam([("table", table)], exchange, lr=1e-3, eps=eps, freeze_step=2)
    for step in range(12):
        table.grad = torch.ones(4, 64)
        table.grad[0] = float(step > 5)
        optimizer.step()
    return [float(row.detach().sub(1).abs().max()) for row in table]


@pytest.mark.parametrize("eps", [0.0, 1e-8])
def test_coordinates_without_a_second_moment_stay(ranks_of: RanksOf, eps: float) -> None:
    for first, *others in ranks_of(2).run(move_late_rows, eps):
        assert first == 0
        assert min(others) > 1e-2
