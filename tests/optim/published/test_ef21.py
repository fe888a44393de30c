"""EF21 against an independent NumPy reference, and against SGD, on real ranks."""

from typing import Any

import numpy as np
import pytest

from comm_hooks import Differences, Exchange
from comm_hooks.optim.published.ef21 import EF21
from tests.optim.references import OPERATORS, Estimate, Exact, Operator, check
from tests.optim.replicas import MIN_NUMEL, SHAPES, gradient, start
from tests.optim.scenarios import RanksOf, Values, history, rarely

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


@pytest.mark.parametrize(
    ("sharded", "momentum"), [(False, 0.0), (True, 0.9), *rarely((False, 0.9), (True, 0.0))]
)
@pytest.mark.parametrize("operator", ["topk", *rarely("identity", "sign")])
def test_matches_the_reference(
    ranks_of: RanksOf, operator: str, sharded: bool, momentum: float
) -> None:
    options = {"operator": operator, "sharded": sharded, "momentum": momentum}
    histories = ranks_of(2).run(history, make, options, STEPS)
    expected = reference(OPERATORS[operator][1], 2, sharded, momentum)
    # 30 float32 steps of the order of 0.02, times 10 with momentum
    check([values[-1] for values in histories], expected, atol=1e-4)
