"""DPSGD against an independent NumPy reference and against torch's SGD."""

from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from comm_hooks.optim.private.optimizers.dp_sgd import DPSGD
from tests.optim.gradients import SHAPES, STEPS, gradient, parameters_of, run, start

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


def test_a_closure_computes_the_gradient() -> None:
    x = nn.Parameter(torch.ones(2))
    optimizer = DPSGD([x], lr=0.5)

    def closure() -> float:
        assert torch.is_grad_enabled()
        x.grad = torch.ones(2)
        return 7.0

    assert optimizer.step(closure) == 7.0
    assert torch.equal(x, torch.full((2,), 0.5))
