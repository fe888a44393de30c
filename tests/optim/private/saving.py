"""What tests of optimizers over noised gradients share."""

import io
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from tests.optim.gradients import parameters_of, run


def saved(what: Any) -> Any:
    """Return what comes back from a file."""
    file = io.BytesIO()
    torch.save(what, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


def resumes_exactly(
    make: Callable[[Any], torch.optim.Optimizer],
    dtype: torch.dtype,
    fresh: Callable[[torch.dtype], dict[str, nn.Parameter]] = parameters_of,
    advance: Callable[..., Any] = run,
) -> bool:
    """Return whether a run that is saved, loaded and continued ends exactly as one that is not."""
    parameters = fresh(dtype)
    optimizer = make(parameters.items())
    advance(parameters, optimizer, steps=range(5))
    values, state = saved([dict(parameters), optimizer.state_dict()])
    again = {name: nn.Parameter(value) for name, value in values.items()}
    resumed = make(again.items())
    resumed.load_state_dict(state)
    for each, own in ((optimizer, parameters), (resumed, again)):
        advance(own, each, steps=range(5, 9))
    return equal([parameters, optimizer.state_dict()], [again, resumed.state_dict()])


def equal(a: Any, b: Any) -> bool:
    if isinstance(a, torch.Tensor):
        return a.dtype == b.dtype and torch.equal(a, b)
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(equal(a[key], b[key]) for key in a)
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(map(equal, a, b))
    return bool(a == b)
