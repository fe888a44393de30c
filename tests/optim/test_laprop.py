"""LaProp's fused step does what its lines say, whatever the parameters' dtypes and layouts."""

from typing import Any

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from comm_hooks.optim import LaProp

HYPERPARAMETERS = {"lr": 0.03, "betas": (0.8, 0.95), "eps": 1e-6, "weight_decay": 0.1}


def plain_step(
    parameter: torch.Tensor, state: dict[str, Any], gradient: torch.Tensor, group: dict[str, Any]
) -> torch.Tensor:
    """Return the next parameter in float64, in the words of the docstring."""
    beta1, beta2 = group["betas"]
    t = state["t"] = state.get("t", 0) + 1
    v = state["v"] = beta2 * state.get("v", 0.0) + (1 - beta2) * gradient**2
    u = gradient / ((v / (1 - beta2**t)).sqrt() + group["eps"])
    m = state["m"] = beta1 * state.get("m", 0.0) + (1 - beta1) * u
    return parameter - group["lr"] * (m / (1 - beta1**t) + group["weight_decay"] * parameter)


def gradient_of(parameter: torch.Tensor, step: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(step)
    return torch.randn(parameter.shape, generator=generator) * 10.0 ** (step % 5 - 2)


@settings(deadline=None)
@given(
    shape=st.lists(st.integers(1, 7), min_size=0, max_size=3),
    transposed=st.booleans(),
    beta1=st.sampled_from([0.0, 0.8, 0.99]),
    weight_decay=st.sampled_from([0.0, 0.1]),
)
def test_it_takes_the_steps_it_describes(
    shape: list[int], transposed: bool, beta1: float, weight_decay: float
) -> None:
    values = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    if transposed and len(shape) >= 2:
        values = values.transpose(0, 1)
    parameter = nn.Parameter(values.clone(memory_format=torch.preserve_format))
    options = {**HYPERPARAMETERS, "betas": (beta1, 0.95), "weight_decay": weight_decay}
    optimizer = LaProp([("w", parameter)], **options)
    expected, state = parameter.detach().double(), dict[str, Any]()
    for step in range(6):
        parameter.grad = gradient_of(parameter, step)
        optimizer.step()
        expected = plain_step(expected, state, gradient_of(parameter, step).double(), options)
    torch.testing.assert_close(parameter.double(), expected, rtol=1e-4, atol=1e-5)


def test_no_element_moves_further_than_it_says() -> None:
    parameter = nn.Parameter(torch.zeros(1000))
    optimizer = LaProp([parameter], lr=1.0, betas=(0.0, 0.95))
    for step in range(40):
        before = parameter.detach().clone()
        parameter.grad = gradient_of(parameter, step) ** 5
        optimizer.step()
        assert float((parameter.detach() - before).abs().max()) <= 1 / (1 - 0.95) ** 0.5 + 1e-3


def test_groups_and_parameters_that_start_later_have_their_own_settings_and_ages() -> None:
    first, second = (nn.Parameter(torch.ones(3)) for _ in range(2))
    optimizer = LaProp([{"params": [first], "lr": 0.1}, {"params": [second]}], lr=0.01)
    for step in range(3):
        first.grad = torch.ones(3)
        second.grad = torch.ones(3) if step else None
        optimizer.step()
    # Constant gradients are normalized to 1 from the first step on.
    torch.testing.assert_close(first.detach(), torch.full((3,), 1 - 3 * 0.1), rtol=0, atol=1e-5)
    torch.testing.assert_close(second.detach(), torch.full((3,), 1 - 2 * 0.01), rtol=0, atol=1e-5)


def test_a_checkpoint_of_adamw_can_be_loaded() -> None:
    parameter = nn.Parameter(torch.ones(3))
    adamw = torch.optim.AdamW([parameter])
    parameter.grad = torch.ones(3)
    adamw.step()
    optimizer = LaProp([parameter])
    optimizer.load_state_dict(adamw.state_dict())
    optimizer.step()
    assert optimizer.state[parameter]["step"] == 2
