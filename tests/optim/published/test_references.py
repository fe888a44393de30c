"""Published optimizers against their docstrings' algorithms in NumPy, on real ranks.

A reference is in float64 and uses nothing of the library.  It gets a parameter ``x``, the steps
``(lr, gradients of the ranks)`` and ``exchange``, that parameter's exchange on all ranks at once.
"""

import math
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import numpy as np
import pytest

from comm_hooks import Sign, TopK
from comm_hooks.compressors import Compressor
from comm_hooks.compressors.dct import DCTTopK
from tests.optim.catalog import HYPER, MAKE
from tests.optim.references import OPERATORS, Estimate, Exact, Operator, PublishedMean, check
from tests.optim.replicas import (
    LR_DECAY,
    SHAPES,
    Mean,
    gradient,
    largest,
    largest_of_blocks,
    start,
    train,
)
from tests.optim.scenarios import RanksOf, rarely

STEPS = 30
LR, DECAY, EPS, (BETA1, BETA2) = (HYPER[n] for n in ("lr", "weight_decay", "eps", "betas"))
Steps = Iterator[tuple[float, list[np.ndarray]]]
Average = Callable[[list[np.ndarray]], np.ndarray]


def ef21(x: np.ndarray, steps: Steps, exchange: Average, momentum: float) -> np.ndarray:
    b = np.zeros_like(x)
    for lr, gradients in steps:
        b = momentum * b + exchange(gradients)
        x = (1 - lr * DECAY) * x - lr * b
    return x


def cd_adam(x: np.ndarray, steps: Steps, exchange: Average, bias_correction: bool) -> np.ndarray:
    m, v, top = (np.zeros_like(x) for _ in range(3))
    for t, (lr, gradients) in enumerate(steps, 1):
        g = exchange(gradients)
        m = BETA1 * m + (1 - BETA1) * g
        v = BETA2 * v + (1 - BETA2) * g**2
        top = np.maximum(top, v)
        c1, c2 = (1 - BETA1**t, 1 - BETA2**t) if bias_correction else (1.0, 1.0)
        x = x - lr * DECAY * x - lr * (m / c1) / (np.sqrt(top / c2) + EPS)
    return x


def one_bit_adam(x: np.ndarray, steps: Steps, exchange: Average, freeze_step: int) -> np.ndarray:
    m, v = np.zeros_like(x), np.zeros_like(x)
    for t, (lr, gradients) in enumerate(steps, 1):
        if t <= freeze_step:
            g = np.mean(gradients, axis=0)
            m = BETA1 * m + (1 - BETA1) * g
            v = BETA2 * v + (1 - BETA2) * g**2
        else:
            m = exchange([BETA1 * m + (1 - BETA1) * g for g in gradients])
        x = x - lr * (m / (np.sqrt(v) + EPS) + DECAY * x)
    return x


def micro_adam(
    x: np.ndarray, steps: Steps, exchange: Average, window: int, bias_correction: str
) -> np.ndarray:
    rows: deque[np.ndarray] = deque(maxlen=None if isinstance(exchange, Exact) else window)
    for t, (lr, gradients) in enumerate(steps, 1):
        rows.appendleft(exchange(gradients))
        m, v = (
            (1 - beta)
            * sum(beta**age * row**power for age, row in enumerate(rows))
            / (1 - beta ** (len(rows) if bias_correction == "window" else t))
            for beta, power in ((BETA1, 1), (BETA2, 2))
        )
        x = x * (1 - lr * DECAY) - lr * m / (np.sqrt(v) + EPS)
    return x


def cocktail_sgd(x: np.ndarray, steps: Steps, exchange: Average, momentum: float) -> np.ndarray:
    u = np.zeros_like(x)
    for lr, gradients in steps:
        u = momentum * u + exchange(gradients)
        x = x * (1 - lr * DECAY) - lr * u
    return x


def demo(x: np.ndarray, steps: Steps, exchange: Average) -> np.ndarray:
    least = np.full_like(x, np.inf)
    for lr, gradients in steps:
        average = exchange(gradients)
        average[np.abs(average) < 1e-12] = 0
        least = np.minimum(least, np.where(average == 0, np.inf, np.abs(average)))
        x = x * (1 - lr * DECAY) - lr * np.sign(average)
    # Where a mean is next to zero its sign is not the same in float32.
    return np.where(least > 1e-5, x, np.nan)


CHUNK, DENSITY = 8, 0.1
N = np.arange(CHUNK)
DCT = np.sqrt(2 / CHUNK) * np.cos(np.pi / (2 * CHUNK) * np.outer(N, 2 * N + 1))
DCT[0] /= np.sqrt(2)


def elements(coefficients: np.ndarray, numel: int) -> np.ndarray:
    return (DCT.T @ coefficients @ DCT).ravel()[:numel]


def largest_coefficients(x: np.ndarray) -> np.ndarray:
    """Keep the largest DCT-II coefficients of every CHUNK x CHUNK piece of a vector."""
    pieces = np.pad(x, (0, -x.size % CHUNK**2)).reshape(-1, CHUNK, CHUNK)
    count = int(np.ceil(DENSITY * CHUNK**2))
    kept = [largest(square.ravel(), count) for square in DCT @ pieces @ DCT.T]
    return np.reshape(kept, (-1, CHUNK, CHUNK))


class MeanOfRanks(Mean):
    """DeMo's residual fades."""

    def __init__(self, compress: Operator, ranks: int, *, sharded: bool) -> None:
        super().__init__(compress, ranks, sharded=sharded, decay=0.99)


class MeanOfSenders(MeanOfRanks):
    """Averages every coefficient over the ranks that sent it."""

    def __call__(self, vectors: list[np.ndarray]) -> np.ndarray:
        vectors = [v + self.decay * e for v, e in zip(vectors, self.errors, strict=True)]
        sent = np.stack([self.compress(vector) for vector in vectors])
        self.errors = [v - elements(s, v.size) for v, s in zip(vectors, sent, strict=True)]
        senders = np.maximum(1, (sent != 0).sum(axis=0))
        return elements(sent.sum(axis=0) / senders, vectors[0].size)


class Case(NamedTuple):
    """An optimizer of the catalog, its reference, its exchange, and the options of both."""

    kind: str
    follow: Callable[..., np.ndarray]
    mean: Callable[..., Average]
    operator: str
    sharded: bool
    options: dict[str, Any]
    atol: float = 2e-5

    def __str__(self) -> str:
        route = "sharded" if self.sharded else "gathered"
        return "-".join([self.kind, self.operator, route, *map(str, self.options.values())])


COMPRESSORS: dict[str, tuple[Compressor, Operator]] = {
    **OPERATORS,
    "topk 64": (TopK(0.05, 64, 32), lambda x: largest_of_blocks(x, 0.05, 64)),
    "published": (Sign(block_size=None, scale="rms"), np.sign),
    "dct": (DCTTopK(CHUNK, DENSITY, 32), largest_coefficients),
}
CASES = [
    Case("ef21", ef21, Estimate, "topk", False, {"momentum": 0.0}),
    Case("ef21", ef21, Estimate, "topk", True, {"momentum": 0.9}, 1e-4),
    Case("cd", cd_adam, Estimate, "sign", False, {"bias_correction": False}, 1e-4),
    Case("cd", cd_adam, Estimate, "sign", True, {"bias_correction": True}, 1e-4),
    # Where a second moment is small, steps are larger.
    Case("one_bit", one_bit_adam, Mean, "sign", True, {"freeze_step": 6}, 1e-4),
    Case("one_bit", one_bit_adam, Mean, "sign", False, {"freeze_step": 6}, 1e-4),
    Case("one_bit", one_bit_adam, PublishedMean, "published", True, {"freeze_step": 6}, 1e-4),
    Case("micro_32", micro_adam, Mean, "topk 64", True, {"window": 4, "bias_correction": "window"}),
    *(Case("cocktail", cocktail_sgd, Mean, "topk 64", True, {"momentum": m}) for m in (0.0, 0.9)),
    Case("demo", demo, MeanOfRanks, "topk 64", False, {}),
    Case("demo", demo, MeanOfSenders, "dct", False, {}),
]
OTHERS = [
    *(Case("ef21", ef21, Estimate, o, True, {"momentum": 0.9}, 1e-4) for o in ("identity", "sign")),
    *(
        Case("cd", cd_adam, Estimate, operator, True, {"bias_correction": False}, 1e-4)
        for operator in ("identity", "topk")
    ),
    *(
        Case("one_bit", one_bit_adam, Mean, operator, True, {"freeze_step": 6}, 1e-4)
        for operator in ("identity", "topk")
    ),
    *(
        Case("micro_32", micro_adam, Mean, "topk 64", False, {"window": n, "bias_correction": how})
        for n, how in ((1, "window"), (4, "published"))
    ),
]


DEFAULTS = [CASES[0], CASES[3], CASES[4], CASES[6], *CASES[-4:]]


def steps(name: str, ranks: int) -> Steps:
    for step in range(STEPS):
        yield LR * LR_DECAY**step, [gradient(name, step, rank).ravel() for rank in range(ranks)]


@pytest.mark.parametrize(
    ("case", "ranks"),
    [
        *((case, 2) for case in CASES),
        *rarely(*((case, 2) for case in OTHERS), (CASES[3], 1), (CASES[6], 4)),
        # With default settings: nothing is compressed twice but by those whose source does it.
        *rarely(*((case, ranks) for case in DEFAULTS for ranks in (4, 8))),
    ],
    ids=str,
)
@pytest.mark.filterwarnings("ignore:world size is 1")
def test_matches_the_reference(ranks_of: RanksOf, case: Case, ranks: int) -> None:
    compressor, compress = COMPRESSORS[case.operator]
    exchange = {
        "compressor": compressor,
        "collective": "sharded" if case.sharded else "all_gather",
    }
    if case in DEFAULTS and ranks > 2:
        exchange["collective"] = "auto"
    expected = {}
    for name, shape in SHAPES.items():
        if case.sharded and name != "bias" and math.prod(shape) % ranks:
            continue  # shards with padding: tests/test_shards.py
        mean = case.mean(compress, ranks, sharded=case.sharded) if name != "bias" else Exact()
        end = case.follow(start(name).ravel(), steps(name, ranks), mean, **case.options)
        expected[name] = end.reshape(shape)
    replicas = ranks_of(ranks).run(train, MAKE[case.kind], {**exchange, **case.options}, STEPS)
    check(replicas, expected, atol=case.atol)
