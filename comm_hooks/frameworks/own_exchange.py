"""Telling optimizers that average by themselves from others."""

from typing import Any, TypeGuard

from torch.optim import Optimizer

from comm_hooks.exchange import Exchange


def owns_exchange(optimizer: object) -> TypeGuard[Any]:
    """Return whether this is an optimizer that averages by itself what it needs averaged."""
    return isinstance(optimizer, Optimizer) and isinstance(
        getattr(optimizer, "exchange", None), Exchange
    )


def works_in_rounds(optimizer: object) -> bool:
    """Return whether its ranks share a server's model, and differ in between."""
    return hasattr(optimizer, "server_parameters")


def unwrapped(optimizer: Any) -> Any:
    """Return the optimizer inside what Accelerate, Fabric or Lightning have made of it."""
    while isinstance(getattr(optimizer, "optimizer", None), Optimizer):
        optimizer = optimizer.optimizer
    return optimizer
