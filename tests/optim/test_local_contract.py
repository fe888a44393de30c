"""What every optimizer that exchanges nothing promises: precision, resumed runs, refusals."""

import io
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

from comm_hooks.optim import AMSGrad, LaProp, MuonAdamW
from comm_hooks.optim.adam import Adam
from tests.optim.gradients import HYPER, SHAPES, STEPS, parameters_of, run

KINDS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "Adam": partial(Adam, **HYPER, bias_correction=True),
    "AMSGrad": partial(AMSGrad, **HYPER, bias_correction=True),
    "AMSGrad, one by one": partial(AMSGrad, **HYPER, foreach=False),
    "LaProp": partial(LaProp, **HYPER),
    "MuonAdamW": partial(MuonAdamW, lr=0.02),
    "Muon and LaProp": partial(MuonAdamW, lr=0.02, rest=LaProp),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", KINDS)
def test_a_resumed_run_ends_as_one_that_was_not_interrupted(kind: str, dtype: torch.dtype) -> None:
    parameters = parameters_of(dtype)
    optimizer = KINDS[kind](parameters.items())
    model = run(parameters, optimizer, steps=range(10))
    file = io.BytesIO()
    torch.save([model, optimizer.state_dict()], file)
    expected = run(parameters, optimizer, steps=range(10, STEPS))
    file.seek(0)
    model, state = torch.load(file, weights_only=True)
    again = parameters_of(dtype)
    for name, parameter in again.items():
        # In a model that lies in memory in another order.
        parameter.data = model[name].t().contiguous().t() if name == "weight" else model[name]
    resumed = KINDS[kind](again.items())
    resumed.load_state_dict(state)
    actual = run(again, resumed, steps=range(10, STEPS))
    for name in SHAPES:
        assert torch.equal(actual[name], expected[name])
        ours, theirs = optimizer.state[parameters[name]], resumed.state[again[name]]
        for key, value in ours.items():
            assert theirs[key].dtype == value.dtype
            assert torch.equal(theirs[key], value)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("kind", [kind for kind in KINDS if "Muon" not in kind])
def test_low_precision_parameters_are_rounded_once(kind: str, dtype: torch.dtype) -> None:
    values, gradients = torch.randn(64).to(dtype), torch.randn(15, 64).to(dtype)
    low, high = nn.Parameter(values.clone()), nn.Parameter(values.float())
    optimizers = [KINDS[kind]([p]) for p in (low, high)]
    for gradient in gradients:
        high.data.copy_(low.detach().float())
        low.grad, high.grad = gradient, gradient.float()
        for optimizer in optimizers:
            optimizer.step()
        assert torch.equal(low, high.to(dtype))
    assert optimizers[0].state[low]["exp_avg_sq"].dtype == torch.float32


@pytest.mark.parametrize("kind", [Adam, AMSGrad, LaProp])
@pytest.mark.parametrize(
    "bad", [{"lr": -1.0}, {"betas": (1.0, 0.9)}, {"eps": -1e-8}, {"weight_decay": -1.0}], ids=str
)
def test_hyperparameters_are_checked(kind: Any, bad: dict[str, Any]) -> None:
    x, y = (nn.Parameter(torch.zeros(2)) for _ in "ab")
    (name,) = bad
    for params, options in (([x], bad), ([{"params": [x], **bad}], {})):
        with pytest.raises(ValueError, match=f"^{kind.__name__}: {name} must"):
            kind(params, **options)
    optimizer = kind([x])
    with pytest.raises(ValueError, match=f"^{kind.__name__}: {name} must"):
        optimizer.add_param_group({"params": [y], **bad})
    assert len(optimizer.param_groups) == 1
