"""Keep the gradients of a client's turn away from the next client."""

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.optim import Optimizer

from comm_hooks.optim.base import parameters_of
from comm_hooks.shards import is_sharded

_TAKEN = "_comm_hooks_taken"  # attribute of a gradient: its version when a step last used it


def mark_taken(parameters: Iterable[torch.Tensor]) -> None:
    """Record that a step has used the present gradients."""
    for parameter in parameters:
        if parameter.grad is not None:
            setattr(parameter.grad, _TAKEN, parameter.grad._version)


@contextmanager
def own_gradients(inner: Optimizer, complain: Callable[[], None]) -> Iterator[None]:
    """Return a context for a client's turn: gradients are cleared at its start and its end.

    Args:
        inner: the optimizer of the steps.
        complain: called at the end if there are gradients that no step used, as after an
            incomplete gradient accumulation.
    """
    inner.zero_grad()
    try:
        yield
        left = [p.grad for p in parameters_of(inner.param_groups) if p.grad is not None]
        untaken: list[Any] = [g for g in left if getattr(g, _TAKEN, None) != g._version]
        parts = [g.to_local() if is_sharded(g) else g for g in untaken]
        # Gradients that were set to zero count as used.
        if parts and any(map(bool, torch._foreach_norm(parts))):
            complain()
    finally:
        inner.zero_grad()
