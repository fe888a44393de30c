"""FetchSGD against NumPy, on real ranks."""

from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn

from comm_hooks import SRHT, CountSketch, Exchange, Identity
from comm_hooks.compressors import Compressor
from comm_hooks.optim.published.fetch_sgd import SKETCH, FetchSGD, median
from comm_hooks.randomness import derive_key, fork
from comm_hooks.wire.summed_header import summed_header_nbytes
from tests.optim.references import check
from tests.optim.replicas import (
    LR_DECAY,
    MIN_NUMEL,
    SHAPES,
    fresh,
    gradient,
    largest,
    start,
    train,
)
from tests.optim.scenarios import RanksOf, rarely

STEPS = 30
# Elements that share their median's cell have the same estimate.  With this seed none of them ever
# stand on both sides of the threshold, where the choice would be arbitrary.
SEED = 1
HYPER = {"lr": 1e-2, "momentum": 0.9, "weight_decay": 0.1, "density": 0.02}
SKETCHED = [name for name, shape in SHAPES.items() if len(shape) > 1]
NUMEL = sum(int(np.prod(SHAPES[name])) for name in SKETCHED)


def make(params: Any, compressor: Compressor, collective: str = "auto", **hyper: Any) -> FetchSGD:
    exchange = Exchange(compressor, None, collective, SEED, min_numel=MIN_NUMEL)
    return FetchSGD(params, exchange, **{**HYPER, **hyper})


def operators(compressor: Compressor, rows: int) -> list[np.ndarray]:
    """The sketches as matrices, column by column."""
    matrices = []
    for row in range(rows):
        (key,) = fork([derive_key(SEED, 0, SKETCH)], row)
        columns = [compressor.compress(unit, key=key) for unit in torch.eye(NUMEL)]
        matrices.append(torch.stack(columns, dim=1).double().numpy())
    return matrices


def reference(
    compressor: Compressor, rows: int, masking: bool, ranks: int
) -> tuple[dict[str, np.ndarray], float]:
    """The docstring's algorithm, in float64, and how closely it once decided between elements."""
    momentum = HYPER["momentum"]
    matrices = operators(compressor, rows)
    w = np.concatenate([start(name).ravel() for name in SKETCHED])
    bias, bias_momentum = start("bias"), np.zeros(SHAPES["bias"])
    momenta = [np.zeros(len(m)) for m in matrices]
    errors = [np.zeros(len(m)) for m in matrices]
    kept = int(np.ceil(HYPER["density"] * NUMEL))
    closest = np.inf
    for step in range(STEPS):
        lr = HYPER["lr"] * LR_DECAY**step
        g = np.mean(
            [
                np.concatenate([gradient(name, step, rank).ravel() for name in SKETCHED])
                for rank in range(ranks)
            ],
            axis=0,
        )
        momenta = [momentum * u + m @ g for u, m in zip(momenta, matrices, strict=True)]
        errors = [e + lr * u for e, u in zip(errors, momenta, strict=True)]
        estimate = np.median([m.T @ e for e, m in zip(errors, matrices, strict=True)], axis=0)
        delta = largest(estimate, kept)
        magnitudes = np.sort(np.abs(estimate))[::-1]
        closest = min(closest, magnitudes[kept - 1] - magnitudes[kept])
        sent = [m @ delta for m in matrices]
        if masking:
            errors = [np.where(s != 0, 0, e) for e, s in zip(errors, sent, strict=True)]
            momenta = [np.where(s != 0, 0, u) for u, s in zip(momenta, sent, strict=True)]
        else:
            errors = [e - s for e, s in zip(errors, sent, strict=True)]
        w = w * (1 - lr * HYPER["weight_decay"]) - delta
        g = np.mean([gradient("bias", step, rank) for rank in range(ranks)], axis=0)
        bias_momentum = momentum * bias_momentum + g
        bias = bias * (1 - lr * HYPER["weight_decay"]) - lr * bias_momentum
    sizes = np.cumsum([int(np.prod(SHAPES[name])) for name in SKETCHED])[:-1]
    pieces = zip(SKETCHED, np.split(w, sizes), strict=True)
    return {"bias": bias} | {name: piece.reshape(SHAPES[name]) for name, piece in pieces}, closest


@pytest.mark.parametrize(
    ("compressor", "rows", "masking"),
    [
        (Identity(), 1, False),
        (Identity(), 1, True),
        pytest.param(SRHT(0.5), 1, False, marks=pytest.mark.slow),
        pytest.param(SRHT(0.5), 4, False, marks=pytest.mark.slow),
        pytest.param(CountSketch(0.51), 5, False, marks=pytest.mark.slow),
        (CountSketch(0.51), 3, True),
        pytest.param(CountSketch(0.51), 4, True, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_matches_the_reference(
    ranks_of: RanksOf, compressor: Compressor, rows: int, masking: bool
) -> None:
    options = {"compressor": compressor, "rows": rows, "masking": masking}
    replicas = ranks_of(2).run(train, make, options, STEPS)
    expected, closest = reference(compressor, rows, masking, ranks=2)
    assert closest > 1e-6, "equal estimates: this reference cannot be followed"
    check(replicas, expected, atol=2e-5)


def traffic(collective: str) -> tuple[float, float, float]:
    exchange = Exchange(CountSketch(0.05), None, collective, exempt_bits=32, min_numel=MIN_NUMEL)
    parameters = fresh()
    optimizer = FetchSGD(parameters.items(), exchange, lr=0.1, density=0.01, rows=3)
    for _ in range(2):
        for parameter in parameters.values():
            parameter.grad = torch.randn_like(parameter)
        optimizer.step()
    stats = exchange.stats()
    return stats["bytes_sent"], stats["bytes_uncompressed"], stats["compression_ratio"]


@pytest.mark.parametrize("collective", ["auto", *rarely("all_reduce", "all_gather")])
def test_counts_what_a_sketch_costs_and_what_it_saves(ranks_of: RanksOf, collective: str) -> None:
    width = round(0.05 * NUMEL)
    bias = SHAPES["bias"][0]
    # A header travels with every payload.
    sent = 2 * 4 * (3 * width + bias)
    saved = 2 * 4 * (NUMEL + bias)
    for bytes_sent, uncompressed, ratio in ranks_of(2).run(traffic, collective):
        assert sent <= bytes_sent <= sent + 2 * (summed_header_nbytes(2) + 8)
        assert abs(uncompressed - saved) <= 2
        assert ratio == uncompressed / bytes_sent


def only_exempt() -> bool:
    parameter = nn.Parameter(torch.zeros(5))
    optimizer = FetchSGD([parameter], Exchange(CountSketch()), lr=0.5, momentum=0.5, density=0.1)
    for _ in range(2):
        parameter.grad = torch.full((5,), 1.0 + dist.get_rank())
        optimizer.step()
    # The mean is 1.5: u = 1.5, then 2.25.
    return torch.equal(parameter.detach(), torch.full((5,), -0.5 * (1.5 + 2.25)))


def test_a_model_of_exempt_parameters_takes_momentum_steps(ranks_of: RanksOf) -> None:
    assert all(ranks_of(2).run(only_exempt))


def group_settings() -> tuple[bool, str, int]:
    parameters = fresh()
    groups = [{"params": [("weight", parameters["weight"])], "weight_decay": 0.0}]
    groups += [{"params": [(n, p) for n, p in parameters.items() if n != "weight"]}]
    optimizer = make(groups, CountSketch(0.3), rows=3, lr=0.5, weight_decay=1.0)
    for parameter in parameters.values():
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    halves = [
        torch.equal(
            p.detach(), (1.0 if n == "weight" else 0.5) * torch.from_numpy(start(n)).float()
        )
        for n, p in parameters.items()
    ]
    optimizer.param_groups[0]["lr"] = 1.0
    with pytest.raises(ValueError, match="need the same lr") as refused:
        optimizer.step()
    return all(halves), str(refused.value), optimizer.exchange.step


def test_groups_may_differ_in_weight_decay_only(ranks_of: RanksOf) -> None:
    for halves, refusal, rounds in ranks_of(2).run(group_settings):
        assert halves
        assert "[0.5, 1.0]" in refusal
        assert rounds == 1


def load_with_other_rows() -> int:
    parameters = fresh()
    optimizer = make(parameters.items(), CountSketch(0.3), rows=3)
    for parameter in parameters.values():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    other = make(parameters.items(), CountSketch(0.3), rows=5)
    other.load_state_dict(optimizer.state_dict())
    with pytest.raises(ValueError, match="loaded sketch_momentum has the shape"):
        other.step()
    return other.exchange.step


def test_a_sketch_of_another_shape_is_refused(ranks_of: RanksOf) -> None:
    assert ranks_of(2).run(load_with_other_rows) == [0, 0]


@pytest.mark.parametrize("count", range(1, 8))
def test_median_is_the_true_median(count: int) -> None:
    values = torch.randn(count, 200).round(decimals=1)
    expected = np.median(values.numpy(), axis=0)
    # The mean of two values of opposite signs is as exact as they are, not as it is.
    rounding = np.finfo(np.float32).eps * values.abs().max()
    np.testing.assert_allclose(median(list(values.unbind())), expected, rtol=0, atol=rounding)
