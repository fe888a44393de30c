"""More of what optimizers that own the exchange go through on real ranks, beside ``replicas``."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist

from tests.optim.replicas import Make, advance, fresh, gradient
from tests.ranks import Ranks

RanksOf = Callable[[int], Ranks]


def rarely(*cases: Any) -> list[Any]:
    """Return parameters of a test that only ``make test-slow`` runs: more of the same trait."""
    tuples = [case if isinstance(case, tuple) else (case,) for case in cases]
    return [pytest.param(*case, marks=pytest.mark.slow) for case in tuples]


Values = dict[str, np.ndarray]


def same(a: Values, b: Values) -> bool:
    return all(np.array_equal(a[name], b[name]) for name in a)


def history(make: Make, options: dict[str, Any], steps: int) -> list[Values]:
    """Return the parameters after each step."""
    parameters = fresh()
    optimizer = make(parameters.items(), **options)
    values = []
    for step in range(steps):
        advance(optimizer, parameters, [step])
        values.append({name: p.detach().numpy().copy() for name, p in parameters.items()})
    return values


def overflow(make: Make, options: dict[str, Any], steps: int, bad: list[int]) -> list[Values]:
    """Train under a GradScaler; rank 1's gradients overflow at some steps.

    A step's gradients come again at the next one if it overflowed, so that a run in which all
    ranks skip such steps ends like one that never met any.
    """
    parameters = fresh()
    optimizer = make(parameters.items(), **options)
    scaler = torch.amp.GradScaler("cpu", init_scale=256.0)
    values = []
    for step in range(steps):
        loss = torch.zeros(())
        for name, parameter in parameters.items():
            parameter.grad = None
            own = gradient(name, step - sum(b < step for b in bad), dist.get_rank())
            loss = loss + (parameter * torch.from_numpy(own).float()).sum()
        if step in bad and dist.get_rank() == 1:
            loss = loss * float("inf")
        scaler.scale(loss).backward()
        if step % 2:
            scaler.unscale_(optimizer)
        scaler.step(optimizer)
        scaler.update()
        values.append({name: p.detach().numpy().copy() for name, p in parameters.items()})
    return values


def collectives(make: Make, options: dict[str, Any], steps: int) -> list[list[str]]:
    """Return the names of each step's collectives, without the agreement on settings."""
    parameters = fresh()
    optimizer = make(parameters.items(), **options)
    transport = optimizer.exchange.transport
    perform = transport.perform
    asked: list[str] = []

    def listen(request: Any) -> Any:
        asked.append(type(request).__name__)
        return perform(request)

    transport.perform = listen  # type: ignore[method-assign]
    per_step = []
    for step in range(steps):
        advance(optimizer, parameters, [step])
        per_step.append([name for name in asked if name != "AllGatherObject"])
        asked.clear()
    return per_step
