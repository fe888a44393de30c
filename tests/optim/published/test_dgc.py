"""DGC against NumPy, on real ranks."""

from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from comm_hooks import Exchange, TopK
from comm_hooks.memory import MomentumCorrection
from comm_hooks.optim.published.dgc import DGC
from tests.optim.references import check
from tests.optim.replicas import (
    LR_DECAY,
    MIN_NUMEL,
    SHAPES,
    gradient,
    largest_of_blocks,
    start,
    train,
)
from tests.optim.scenarios import RanksOf, rarely

STEPS, DENSITY, BLOCK, MOMENTUM = 30, 0.03, 64, 0.9
HYPER = {"lr": 1e-2, "weight_decay": 0.1}


def make(params: Any, **hyper: Any) -> DGC:
    memory = MomentumCorrection(MOMENTUM)
    exchange = Exchange(TopK(DENSITY, BLOCK, 32), memory, "all_gather", min_numel=MIN_NUMEL)
    return DGC(params, exchange, **{**HYPER, **hyper})


def densities(warmup_steps: int) -> list[float]:
    """The density of each step, as the paper's table: four values of a quarter each, then r."""
    values = np.geomspace(0.25, DENSITY, 5)
    quarters = [values[min(4, 4 * step // warmup_steps)] for step in range(warmup_steps)]
    return (quarters + [DENSITY] * STEPS)[:STEPS]


def reference(
    ranks: int, warmup_steps: int, clip_norm: float | None
) -> tuple[dict[str, np.ndarray], int]:
    """The docstring's algorithm, in float64, and how often a gradient was clipped."""
    x = {name: start(name).ravel() for name in SHAPES}
    u = {name: np.zeros((ranks, x[name].size)) for name in SHAPES}
    e = {name: np.zeros((ranks, x[name].size)) for name in SHAPES}
    clipped = 0
    for step, density in enumerate(densities(warmup_steps)):
        sent: dict[str, list[np.ndarray]] = {name: [] for name in SHAPES}
        for rank in range(ranks):
            g = {name: gradient(name, step, rank).ravel() for name in SHAPES}
            norm = np.sqrt(sum((v**2).sum() for v in g.values()))
            if clip_norm and norm > clip_norm / np.sqrt(ranks):
                clipped += 1
                g = {name: v * clip_norm / np.sqrt(ranks) / norm for name, v in g.items()}
            for name in SHAPES:
                u[name][rank] = MOMENTUM * u[name][rank] + g[name]
                if name == "bias":
                    sent[name].append(u[name][rank])
                    continue
                e[name][rank] += u[name][rank]
                part = largest_of_blocks(e[name][rank], density, BLOCK)
                e[name][rank] -= part
                u[name][rank][part != 0] = 0
                sent[name].append(part)
        lr = HYPER["lr"] * LR_DECAY**step
        for name in SHAPES:
            x[name] = x[name] * (1 - lr * HYPER["weight_decay"])
            x[name] = x[name] - lr * np.mean(sent[name], axis=0)
    return {name: v.reshape(SHAPES[name]) for name, v in x.items()}, clipped


@pytest.mark.parametrize("ranks", [2, *rarely(1)])
@pytest.mark.parametrize(
    ("warmup_steps", "clip_norm"), [(0, None), (0, 41.0), (21, None), (40, 30.0)]
)
@pytest.mark.filterwarnings("ignore:world size is 1")
def test_matches_the_reference(
    ranks_of: RanksOf, ranks: int, warmup_steps: int, clip_norm: float | None
) -> None:
    options = {"warmup_steps": warmup_steps, "clip_norm": clip_norm}
    replicas = ranks_of(ranks).run(train, make, options, STEPS)
    expected, clipped = reference(ranks, warmup_steps, clip_norm)
    assert (clipped > 0) == (clip_norm is not None)
    check(replicas, expected, atol=2e-5)


def norms_of_updates(scale: float) -> tuple[list[float], int]:
    """The norm of the mean gradient that arrives, where all ranks agree, and the steps taken."""
    parameter = nn.Parameter(torch.zeros(40, 40))
    exchange = Exchange(TopK(1.0, value_bits=32), MomentumCorrection(0.0))
    optimizer = DGC([parameter], exchange, lr=1.0, clip_norm=2.0)
    norms = []
    for _ in range(2):
        before = parameter.detach().clone()
        parameter.grad = torch.full((40, 40), scale)
        optimizer.step()
        norms.append(float((parameter.detach() - before).norm()))
    return norms, int(optimizer.state[parameter]["step"])


@pytest.mark.parametrize(
    ("scale", "norm", "taken"),
    # The squares of the last one are not float32.
    [(1.0, 2 / 2**0.5, 2), (0.01, 0.4, 2), (0.0, 0.0, 2), (1e30, 2 / 2**0.5, 2)],
    ids=str,
)
def test_clips_by_the_number_of_ranks(
    ranks_of: RanksOf, scale: float, norm: float, taken: int
) -> None:
    norms, steps = ranks_of(2).run(norms_of_updates, scale)[0]
    assert norms == pytest.approx([norm, norm], rel=1e-4)
    assert steps == taken
