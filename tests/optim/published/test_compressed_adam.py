"""CompressedAdam against an independent NumPy reference, on real ranks."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn

from comm_hooks import ErrorFeedback, Exchange, Identity, TopK
from comm_hooks.compressors import Compressor
from comm_hooks.optim import CompressedAdam
from tests.optim.decaying import (
    COMPRESSORS,
    FREEZE,
    SHAPES,
    STEPS,
    gradient,
    start,
)
from tests.optim.references import check
from tests.optim.scenarios import RanksOf, rarely

HYPER = {"lr": 1e-2, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1}


def train(compressor: Compressor, options: dict[str, Any], named: bool) -> dict[str, np.ndarray]:
    rank = dist.get_rank()
    parameters = {n: nn.Parameter(torch.from_numpy(start(n)).float()) for n in SHAPES}
    memory = None if isinstance(compressor, Identity) else ErrorFeedback()
    exchange = Exchange(compressor, memory, "all_gather", min_numel=16)
    optimizer = CompressedAdam(
        parameters.items() if named else parameters.values(),
        exchange,
        freeze_step=FREEZE,
        **HYPER,
        **options,
    )
    for step in range(STEPS):
        for name, parameter in parameters.items():
            parameter.grad = torch.from_numpy(gradient(name, step, rank)).float()
        optimizer.step()
    return {name: p.detach().numpy() for name, p in parameters.items()}


def reference(
    compress: Callable[[np.ndarray], np.ndarray], ranks: int, scaled: bool
) -> dict[str, np.ndarray]:
    """The docstring's algorithm, in float64 and without any of the library."""
    beta1, beta2 = HYPER["betas"]
    results = {}
    for name in SHAPES:
        x = start(name)
        m, v, shape, u = (np.zeros_like(x) for _ in range(4))
        errors = [np.zeros_like(x) for _ in range(ranks)]
        power = 0.0
        for step in range(STEPS):
            t = step + 1
            gs = [gradient(name, step, rank) for rank in range(ranks)]
            mean_square = np.mean([np.mean(g**2) for g in gs])
            power = beta2 * power + (1 - beta2) * mean_square
            s = np.sqrt(u) + HYPER["eps"]
            if t <= FREEZE:
                g = np.mean(gs, axis=0)
                m = beta1 * m + (1 - beta1) * g
                v = beta2 * v + (1 - beta2) * g**2
                shape = beta2 * shape + (1 - beta2) * g**2 / mean_square
                second = v / (1 - beta2**t)
            else:
                own = [beta1 * m + (1 - beta1) * g for g in gs]
                if scaled:
                    own = [o / s for o in own]
                if name == "bias":
                    sent = own
                else:
                    inputs = [o + e for o, e in zip(own, errors, strict=True)]
                    sent = [compress(i) for i in inputs]
                    errors = [i - c for i, c in zip(inputs, sent, strict=True)]
                m = np.mean(sent, axis=0)
                if scaled:
                    m = m * s
                second = u * power / (1 - beta2**t)
            if t == FREEZE:
                u = (shape + 0.1 * shape.mean()) / (1 - beta2**FREEZE)
            root = np.sqrt(second) + HYPER["eps"]
            x = x * (1 - HYPER["lr"] * HYPER["weight_decay"])
            x = x - HYPER["lr"] * m / (1 - beta1**t) / root
        results[name] = x
    return results


@pytest.mark.parametrize("ranks", [2, *rarely(1, 4)])
@pytest.mark.parametrize("scaled", [False, True])
@COMPRESSORS
@pytest.mark.filterwarnings("ignore:world size is 1")
def test_matches_the_reference(
    ranks_of: RanksOf,
    compressor: Compressor,
    compress: Callable[[np.ndarray], np.ndarray],
    ranks: int,
    scaled: bool,
) -> None:
    options = {"scaled": scaled}
    replicas = ranks_of(ranks).run(train, compressor, options, True)
    expected = reference(compress, ranks, scaled)
    # 30 float32 steps of size 0.01
    check(replicas, expected, atol=2e-5)


def test_an_exchange_that_would_compress_its_scales_is_refused() -> None:
    parameters = [nn.Parameter(torch.zeros(8, 8)) for _ in range(3)]
    exchange = Exchange(TopK(), ErrorFeedback(), min_ndim=1, min_numel=3)
    with pytest.raises(ValueError, match="leave min_ndim at 2"):
        CompressedAdam(parameters, exchange, freeze_step=1)
