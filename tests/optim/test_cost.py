"""The cost of a step grows no faster than the number of tensors."""

import sys
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from comm_hooks import Exchange, Sign, register
from comm_hooks.collectives import Transport, run_ranks
from comm_hooks.optim import (
    DiLoCo,
    FedAMS,
    FedAvg,
    FedLAMB,
    MuLoCo,
    low_communication,
)
from tests.optim.catalog import MAKE
from tests.ranks import RanksOf

FEW, MANY = 20, 200
SHAPES = (16, 32), (32,)


def rounds(kind: Any, **options: Any) -> Callable[..., Any]:
    """Return a function that makes an optimizer with two local steps."""

    def make(params: Any, transport: Transport) -> Any:
        return kind(params, Exchange(Sign(), transport=transport), local_steps=2, **options)

    return make


ROUNDS: dict[str, Callable[..., Any]] = {
    "low_communication": partial(low_communication, lr=0.01, bits_per_parameter=8.0),
    "fed_avg": rounds(FedAvg),
    "diloco": rounds(DiLoCo, fragments=2),
    "mu_lo_co": rounds(MuLoCo),
    "fed_ams": rounds(FedAMS),
    "fed_lamb": rounds(FedLAMB),
}


class Counter:
    """Counts the calls of functions in this thread within its context."""

    count = 0

    def __enter__(self) -> "Counter":
        sys.setprofile(self._note)
        return self

    def __exit__(self, *error: object) -> None:
        sys.setprofile(None)

    def _note(self, frame: Any, event: str, argument: Any) -> None:
        self.count += event in ("call", "c_call")


def calls(make: Callable[..., Any], tensors: int) -> int:
    """Return the calls in two steps of one rank of two, after others."""

    def rank(transport: Transport) -> int:
        names = [f"layer{i}" for i in range(tensors)]
        params = [
            (name, torch.nn.Parameter(torch.ones(SHAPES[i % 2]))) for i, name in enumerate(names)
        ]
        optimizer = make(params, transport=transport)
        for step in range(6):
            for _, parameter in params:
                parameter.grad = torch.randn_like(parameter)
            if step < 4:
                optimizer.step()
                continue
            with counter:
                optimizer.step()
        return counter.count

    counter = Counter()
    return run_ranks(rank, 2)[0]


def calls_of_hook(tensors: int) -> int:
    """Return the calls in the backward pass of a model with a hook."""
    model = nn.Sequential(*[nn.Linear(16, 16) for _ in range(tensors // 2)])
    ddp = DistributedDataParallel(model)
    register(ddp, "sign", min_numel=16)
    for step in range(4):
        loss = ddp(torch.ones(1, 16)).sum()
        if step < 3:
            loss.backward()
            continue
        with Counter() as counter:
            loss.backward()
    return counter.count


@pytest.mark.parametrize("kind", [*MAKE, *ROUNDS])
def test_calls_grow_no_faster_than_tensors(kind: str) -> None:
    make = ROUNDS[kind] if kind in ROUNDS else MAKE[kind]
    few, many = calls(make, FEW), calls(make, MANY)
    assert many < 1.1 * few * MANY / FEW


def test_calls_of_a_hook_grow_no_faster_than_tensors(ranks_of: RanksOf) -> None:
    few, many = (ranks_of(2).run(calls_of_hook, tensors)[0] for tensors in (FEW, MANY))
    assert many < 1.1 * few * MANY / FEW
