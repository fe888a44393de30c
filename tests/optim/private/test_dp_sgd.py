"""DPSGD against an independent NumPy reference and against torch's SGD."""

from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from comm_hooks.optim.private.dp_sgd import DPSGD
from tests.optim.gradients import SHAPES, STEPS, gradient, parameters_of, run, start
from tests.optim.private.saving import resumes_exactly

LR = 0.05


def reference(momentum: float, nesterov: bool, weight_decay: float) -> dict[str, np.ndarray]:
    """The docstring's algorithm, without any of the library."""
    results = {}
    for name in SHAPES:
        x, b = start(name), np.zeros(SHAPES[name])
        for step in range(STEPS):
            g = gradient(name, step)
            if g is None:
                continue
            lr = LR * 0.9**step
            x = (1 - lr * weight_decay) * x
            b = momentum * b + g
            x = x - lr * (g + momentum * b if nesterov else b)
        results[name] = x
    return results


@pytest.mark.parametrize("weight_decay", [0.0, 0.3])
@pytest.mark.parametrize(("momentum", "nesterov"), [(0.0, False), (0.9, False), (0.9, True)])
def test_matches_the_reference_and_torch(
    momentum: float, nesterov: bool, weight_decay: float
) -> None:
    hyper = {"momentum": momentum, "nesterov": nesterov, "weight_decay": weight_decay}
    results = []
    for make in (DPSGD, torch.optim.SGD):
        parameters = parameters_of()
        optimizer: Any = make(parameters.values(), lr=LR, **hyper)
        schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
        results.append(run(parameters, optimizer, schedule))
    ours, theirs = results
    expected = reference(momentum, nesterov, weight_decay)
    for name in SHAPES:
        np.testing.assert_allclose(ours[name].numpy(), expected[name], rtol=1e-11, atol=1e-13)
        is_same = torch.allclose(ours[name], theirs[name], rtol=1e-11, atol=1e-13)
        assert is_same == (not momentum or not weight_decay), "decay must stay out of the momentum"


def test_without_momentum_it_has_no_state() -> None:
    parameters = parameters_of()
    optimizer = DPSGD(parameters.values(), lr=LR)
    run(parameters, optimizer)
    assert not optimizer.state


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_narrow_parameters_are_rounded_once(dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(0)
    narrow = nn.Parameter(torch.randn(1000, generator=generator).to(dtype))
    wide = nn.Parameter(narrow.detach().float())
    kept = torch.zeros(1000)
    optimizers = [DPSGD([x], lr=0.01, momentum=0.9, weight_decay=0.1) for x in (narrow, wide)]
    for _ in range(3):
        narrow.grad = torch.randn(1000, generator=generator).to(dtype)
        wide.grad = narrow.grad.float()
        kept = 0.9 * kept + wide.grad
        with torch.no_grad():
            wide.copy_(narrow)
        for optimizer in optimizers:
            optimizer.step()
        assert torch.equal(narrow, wide.to(dtype))
        assert not torch.equal(wide, narrow.float())
    buffer = optimizers[0].state[narrow]["momentum_buffer"]
    assert buffer.dtype == torch.float32
    torch.testing.assert_close(buffer, kept)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_resumed_run_ends_as_one_that_was_not_interrupted(dtype: torch.dtype) -> None:
    assert resumes_exactly(lambda params: DPSGD(params, lr=LR, momentum=0.9), dtype)


def test_groups_may_differ_and_mix_dtypes() -> None:
    dtypes = [torch.float32, torch.bfloat16, torch.float64, torch.bfloat16]
    results = []
    for together in (True, False):
        xs = [nn.Parameter(torch.linspace(1, 2, 9, dtype=d)) for d in dtypes]
        frozen = nn.Parameter(torch.ones(3))
        for x in [*xs, frozen]:
            x.grad = x.detach() - 1.5
        groups: list[Any] = [xs] if together else [[x] for x in xs]
        for members in groups:
            optimizer = DPSGD(members, lr=0.1, momentum=0.9, weight_decay=0.1)
            optimizer.add_param_group({"params": [frozen], "lr": 0.0})
            optimizer.step()
        assert torch.equal(frozen, torch.ones(3))
        results.append(xs)
    for mixed, alone in zip(*results, strict=True):
        assert mixed.dtype == alone.dtype
        assert torch.equal(mixed, alone)


def test_a_closure_computes_the_gradient() -> None:
    x = nn.Parameter(torch.ones(2))
    optimizer = DPSGD([x], lr=0.5)

    def closure() -> float:
        assert torch.is_grad_enabled()
        x.grad = torch.ones(2)
        return 7.0

    assert optimizer.step(closure) == 7.0
    assert torch.equal(x, torch.full((2,), 0.5))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"lr": -1.0}, "lr must not be negative, got -1.0"),
        ({"lr": float("inf")}, "lr must be finite, got inf"),
        ({"momentum": 1.0}, r"momentum must lie in \[0, 1\), got 1.0"),
        ({"momentum": -0.5}, r"momentum must lie in \[0, 1\), got -0.5"),
        ({"nesterov": True}, "nesterov needs momentum: set momentum=0.9, say"),
        ({"weight_decay": float("nan")}, "weight_decay must not be negative, got nan"),
    ],
    ids=str,
)
def test_bad_hyperparameters_are_refused(options: dict[str, Any], message: str) -> None:
    x, y = (nn.Parameter(torch.zeros(2)) for _ in "ab")
    with pytest.raises(ValueError, match=f"^DPSGD: {message}$"):
        DPSGD([x], **{"lr": 1.0, **options})
    optimizer = DPSGD([x], lr=1.0)
    with pytest.raises(ValueError, match=f"^DPSGD: {message}$"):
        optimizer.add_param_group({"params": [y], **options})
    assert len(optimizer.param_groups) == 1


@pytest.mark.parametrize("kind", ["sparse", "complex"])
def test_a_refused_gradient_changes_nothing(kind: str) -> None:
    x = nn.Parameter(torch.ones(2))
    x.grad = torch.ones(2)
    bad = nn.Parameter(torch.ones(2, dtype=torch.complex64 if kind == "complex" else torch.float32))
    bad.grad = torch.ones_like(bad).to_sparse() if kind == "sparse" else torch.ones_like(bad)
    optimizer = DPSGD([{"params": [x]}, {"params": [bad]}], lr=0.1, momentum=0.9)
    with pytest.raises(ValueError, match=f"^DPSGD does not support {kind} gradients: "):
        optimizer.step()
    assert torch.equal(x, torch.ones(2))
    assert not optimizer.state
