"""FrozenVarianceAdam against a NumPy reference, and behind signs that begin when it freezes."""

from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from comm_hooks.optim import FrozenVarianceAdam
from tests.optim.gradients import HYPER, SHAPES, STEPS, gradient, parameters_of, run, start

FREEZE = 12


def reference(freeze_step: int, weight_decay: float = 0.0) -> dict[str, np.ndarray]:
    """The docstring's algorithm, without any of the library."""
    lr, (beta1, beta2), eps = HYPER["lr"], HYPER["betas"], HYPER["eps"]
    results = {}
    for name in SHAPES:
        x = start(name)
        m = v = np.zeros_like(x)
        t = 0
        for step in range(STEPS):
            u = gradient(name, step)
            if u is None:
                continue
            t += 1
            m = beta1 * m + (1 - beta1) * u
            if t <= freeze_step:
                v = beta2 * v + (1 - beta2) * u**2
            x = (1 - lr * weight_decay) * x - lr * m / (np.sqrt(v) + eps)
        results[name] = x
    return results


@pytest.mark.parametrize("freeze_step", [1, FREEZE, STEPS])
@pytest.mark.parametrize("weight_decay", [0.0, 0.3])
def test_matches_the_reference(freeze_step: int, weight_decay: float) -> None:
    # A parameter's own steps count: the bias, which misses some, freezes later than the others.
    parameters = parameters_of()
    optimizer = FrozenVarianceAdam(
        parameters.values(), **HYPER, weight_decay=weight_decay, freeze_step=freeze_step
    )
    actual = run(parameters, optimizer)
    expected = reference(freeze_step, weight_decay)
    for name in SHAPES:
        np.testing.assert_allclose(actual[name].numpy(), expected[name], rtol=1e-11, atol=1e-13)


@pytest.mark.parametrize("eps", [0.0, 1e-8])
def test_elements_without_a_gradient_until_then_are_only_decayed(eps: float) -> None:
    x = nn.Parameter(torch.ones(4))
    optimizer = FrozenVarianceAdam([x], lr=0.1, eps=eps, weight_decay=0.5, freeze_step=2)
    for step in range(4):
        x.grad = torch.tensor([1.0, -1.0, 0.0, 0.0])
        if step >= 2:
            x.grad[2:] = 1e-3  # what signs bring: there is no zero among them
        optimizer.step()
    torch.testing.assert_close(x[2:].detach(), torch.full((2,), 0.95**4))
    assert (x[:2] - 0.95**4).abs().min() > 0.1


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"freeze_step": 0}, "freeze_step must be an integer of at least 1, got 0"),
        ({"freeze_step": 9, "total_steps": 9}, "freeze_step 9 leaves none of total_steps 9"),
        ({"freeze_step": 9, "lr": -1.0}, r"lr must lie in \[0, inf\)"),
    ],
)
def test_bad_arguments(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=f"^FrozenVarianceAdam: {message}"):
        FrozenVarianceAdam([nn.Parameter(torch.zeros(2))], **options)
    groups = [{"params": [nn.Parameter(torch.zeros(2))], "freeze_step": 1.5}]
    with pytest.raises(ValueError, match=r"^FrozenVarianceAdam: freeze_step must be an integer"):
        FrozenVarianceAdam(groups, freeze_step=2)
