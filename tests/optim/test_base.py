"""State in other dtypes than the parameters', saved and loaded."""

import io
from typing import Any

import pytest
import torch
from torch import nn

from comm_hooks.optim.base import ExactStateOptimizer


class Window(ExactStateOptimizer):
    """Keeps what bfloat16 cannot hold."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {})

    def step(self, closure: Any = None) -> None:
        for parameter in (p for group in self.param_groups for p in group["params"]):
            state = self.state[parameter]
            state["step"] = torch.tensor(777.0)
            state["mean"] = torch.full_like(parameter, 1 / 3, dtype=torch.float32)
            state["sum"] = torch.full_like(parameter, 1 / 3, dtype=torch.float64)
            state["values"] = torch.full_like(parameter, 1 / 3, dtype=torch.bfloat16)
            state["indices"] = torch.arange(1000, 1003, dtype=torch.int16)
            state["bits"] = torch.tensor([1, 255], dtype=torch.uint8)


def make(dtype: torch.dtype) -> tuple[nn.Parameter, Window]:
    parameter = nn.Parameter(torch.zeros(3, dtype=dtype))
    groups = [{"params": [("a", nn.Parameter(torch.zeros(1)))]}, {"params": [("b", parameter)]}]
    return parameter, Window(groups)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_a_checkpoint_comes_back_as_it_was(dtype: torch.dtype) -> None:
    before, saved = make(dtype)
    saved.step()
    file = io.BytesIO()
    torch.save(saved.state_dict(), file)
    file.seek(0)
    after, loaded = make(dtype)
    loaded.load_state_dict(torch.load(file, weights_only=True))
    old, new = saved.state[before], loaded.state[after]
    assert list(new) == list(old)
    for key in old:
        assert new[key].dtype == old[key].dtype
        assert torch.equal(new[key], old[key])


def test_hooks_that_replace_the_state_are_heard() -> None:
    def halve(optimizer: torch.optim.Optimizer, state: dict[str, Any]) -> dict[str, Any]:
        entries = {k: v | {"mean": v["mean"] / 2} for k, v in state["state"].items()}
        return state | {"state": entries}

    _, saved = make(torch.bfloat16)
    saved.step()
    parameter, optimizer = make(torch.bfloat16)
    optimizer.register_load_state_dict_pre_hook(halve)
    for _ in range(2):
        optimizer.load_state_dict(saved.state_dict())
        assert torch.equal(optimizer.state[parameter]["mean"], torch.full((3,), 1 / 3) / 2)


def test_a_state_that_does_not_fit_is_refused() -> None:
    parameter, optimizer = make(torch.bfloat16)
    optimizer.step()
    before = optimizer.state_dict()
    with pytest.raises(ValueError, match="parameter group"):
        optimizer.load_state_dict(Window([nn.Parameter(torch.ones(1))]).state_dict())
    assert list(optimizer.state[parameter]) == list(before["state"][1])
    optimizer.load_state_dict(before)
