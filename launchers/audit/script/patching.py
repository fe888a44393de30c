"""Methods that are called around others, and tensors in one row."""

from collections.abc import Callable
from typing import Any
from unittest import mock

import torch


def around(owner: type, name: str, wrapper: Callable[..., Any]) -> Any:
    """Return a patch by which a method is called as the first argument of ``wrapper``."""
    original = owner.__dict__[name]

    def replacement(*args: Any, **kwargs: Any) -> Any:
        return wrapper(original, *args, **kwargs)

    return mock.patch.object(owner, name, replacement)


def flat(tensors: Any) -> torch.Tensor:
    """Return a copy of all elements of some tensors, float32."""
    return torch.cat([t.detach().float().cpu().reshape(-1) for t in tensors])
