"""MicroAdam against NumPy and AdamW, on real ranks; what it keeps, in bytes."""

from collections import deque
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn

from comm_hooks import ErrorFeedback, Exchange, TopK
from comm_hooks.optim.published.micro_adam import MicroAdam
from tests.optim.references import check
from tests.optim.replicas import (
    LR_DECAY,
    MIN_NUMEL,
    SHAPES,
    Mean,
    fresh,
    gradient,
    largest_of_blocks,
    start,
    train,
)
from tests.optim.scenarios import RanksOf, rarely

STEPS, WINDOW, DENSITY, BLOCK = 30, 4, 0.05, 64
HYPER = {"lr": 1e-2, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1}

pytestmark = pytest.mark.filterwarnings("ignore:world size is 1")


def make(
    params: Any, collective: str = "sharded", bits: int = 32, value_bits: int = 32, **hyper: Any
) -> MicroAdam:
    memory = ErrorFeedback(bits, stochastic=bits == 4)
    exchange = Exchange(TopK(DENSITY, BLOCK, value_bits), memory, collective, min_numel=MIN_NUMEL)
    return MicroAdam(params, exchange, **{**HYPER, "window": WINDOW, **hyper})


def reference(
    ranks: int, sharded: bool, window: int, bias_correction: str
) -> dict[str, np.ndarray]:
    """The docstring's algorithm, in float64 and without any of the library."""
    results = {}
    for name in SHAPES:
        x = start(name).ravel()
        is_exempt = len(SHAPES[name]) == 1
        mean = Mean(
            (lambda v: v) if is_exempt else (lambda v: largest_of_blocks(v, DENSITY, BLOCK)),
            ranks,
            sharded=sharded and not is_exempt,
        )
        rows: deque[np.ndarray] = deque(maxlen=None if is_exempt else window)
        for step in range(STEPS):
            rows.appendleft(mean([gradient(name, step, r).ravel() for r in range(ranks)]))
            averages = []
            for beta, power in zip(HYPER["betas"], (1, 2), strict=True):
                weights = beta ** np.arange(len(rows))
                total = sum(w * row**power for w, row in zip(weights, rows, strict=True))
                terms = len(rows) if bias_correction == "window" else step + 1
                averages.append((1 - beta) * total / (1 - beta**terms))
            m, v = averages
            lr = HYPER["lr"] * LR_DECAY**step
            x = x * (1 - lr * HYPER["weight_decay"])
            x = x - lr * m / (np.sqrt(v) + HYPER["eps"])
        results[name] = x.reshape(SHAPES[name])
    return results


@pytest.mark.parametrize(
    ("window", "bias_correction"),
    [(WINDOW, "window"), *rarely((1, "window"), (WINDOW, "published"))],
)
@pytest.mark.parametrize(
    ("ranks", "collective"), [(2, "sharded"), *rarely((1, "all_gather"), (2, "all_gather"))]
)
def test_matches_the_reference(
    ranks_of: RanksOf, ranks: int, collective: str, window: int, bias_correction: str
) -> None:
    options = {"collective": collective, "window": window, "bias_correction": bias_correction}
    replicas = ranks_of(ranks).run(train, make, options, STEPS)
    expected = reference(ranks, collective == "sharded", window, bias_correction)
    # 30 float32 steps of size 0.01
    check(replicas, expected, atol=2e-5)


def kept_bytes(collective: str, value_bits: int) -> float:
    model = nn.Sequential(*[nn.Linear(256, 256, bias=False) for _ in range(16)])
    torch.manual_seed(dist.get_rank())
    exchange = Exchange(
        TopK(0.01, value_bits=value_bits), ErrorFeedback(bits=4, stochastic=True), collective
    )
    optimizer = MicroAdam(model.named_parameters(), exchange, lr=1e-3, window=10)
    for _ in range(2):
        for parameter in model.parameters():
            parameter.grad = torch.randn_like(parameter)
        optimizer.step()

    def count(state: Any) -> int:
        if isinstance(state, torch.Tensor):
            return state.nbytes
        return sum(map(count, state.values())) if isinstance(state, dict) else 0

    kept = count(optimizer.state_dict()["state"]) + count(exchange.state_dict())
    return kept / sum(p.numel() for p in model.parameters())


@pytest.mark.parametrize(
    ("ranks", "collective", "value_bits", "most"),
    [(1, "all_gather", 16, 0.85), (1, "all_gather", 4, 0.70), (2, "sharded", 4, 0.97)],
)
def test_takes_less_than_a_byte_per_parameter(
    ranks_of: RanksOf, ranks: int, collective: str, value_bits: int, most: float
) -> None:
    assert max(ranks_of(ranks).run(kept_bytes, collective, value_bits)) <= most


def learn_with_groups() -> tuple[bool, bool]:
    parameters = fresh()
    (first, one), *rest = parameters.items()
    before = one.detach().clone()
    groups = [{"params": [(first, one)], "lr": 0.0}, {"params": rest, "betas": (0.5, 0.9)}]
    optimizer = make(groups)
    for name, parameter in parameters.items():
        parameter.grad = torch.from_numpy(gradient(name, 0, dist.get_rank())).float()
    optimizer.step()
    moved = {
        n: not np.array_equal(p.detach().numpy(), start(n).astype(np.float32)) for n, p in rest
    }
    return torch.equal(before, one), all(moved.values())


def test_groups_have_their_own_hyperparameters(ranks_of: RanksOf) -> None:
    assert ranks_of(2).run(learn_with_groups) == [(True, True)] * 2


def load_with_another_window() -> str:
    parameters = fresh()
    optimizer = make(parameters.items())
    for parameter in parameters.values():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    other = make(parameters.items(), window=WINDOW + 1)
    other.load_state_dict(optimizer.state_dict())
    before = {n: p.detach().clone() for n, p in parameters.items()}
    with pytest.raises(ValueError, match="a loaded window has the shape") as refused:
        other.step()
    assert all(torch.equal(before[n], p) for n, p in parameters.items())
    assert other.exchange.step == 0
    return str(refused.value)


def test_a_window_of_another_size_is_refused(ranks_of: RanksOf) -> None:
    assert all(
        "saved with other settings" in text for text in ranks_of(2).run(load_with_another_window)
    )
