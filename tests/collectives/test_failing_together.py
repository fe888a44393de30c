"""A rank that fails and goes on, or ends, lets no other rank wait, and is the one that is named."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from comm_hooks import Exchange, PayloadError, PeerError, Sign, register
from comm_hooks.optim import LocalVarianceAdam, low_communication
from tests.ranks import RanksOf

SOON = 10.0  # seconds, of a timeout of 60
BAD, LAST = 1, 8
Step = Callable[[], None]


@contextmanager
def failing(model: nn.Module, target: str) -> Iterator[None]:
    """Let a function of the library raise on one rank."""
    if dist.get_rank() == BAD:
        with mock.patch(target, side_effect=LookupError("no such thing")):
            yield
    else:
        yield


def loss_of(model: nn.Module) -> torch.Tensor:
    loss: torch.Tensor = model(torch.randn(4, 40)).square().mean()
    return loss


def with_hook(model: nn.Module, group: dist.ProcessGroup) -> tuple[Step, Any]:
    ddp = DistributedDataParallel(model, bucket_cap_mb=1e-3, process_group=group)
    state = register(ddp, "topk", density=0.1, min_numel=64)
    sgd = torch.optim.SGD(model.parameters(), lr=0.1)

    def step() -> None:
        sgd.zero_grad()
        loss_of(ddp).backward()
        sgd.step()

    return step, state.exchange


def with_optimizer(model: nn.Module, group: dist.ProcessGroup) -> tuple[Step, Any]:
    exchange = Exchange(Sign(), process_group=group, min_numel=64)
    optimizer = LocalVarianceAdam(model.named_parameters(), exchange, lr=0.01)

    def step() -> None:
        optimizer.zero_grad()
        loss_of(model).backward()
        optimizer.step()

    return step, exchange


def with_rounds(model: nn.Module, group: dist.ProcessGroup) -> tuple[Step, Any]:
    optimizer = low_communication(
        model.named_parameters(), lr=0.01, bits_per_parameter=4.0, process_group=group
    )

    def step() -> None:
        optimizer.zero_grad()
        loss_of(model).backward()
        optimizer.step()
        if optimizer.steps == LAST:
            optimizer.synchronize()

    return step, optimizer.exchange


SETUPS = {"hook": with_hook, "optimizer": with_optimizer, "rounds": with_rounds}
PLACES = {
    "before its round": "comm_hooks.exchange.bucket.Buckets.of_segments",
    "while it compresses": "comm_hooks.exchange.payload.PayloadFormat.encode_all",
    "while it decodes": "comm_hooks.exchange.payload.PayloadFormat.decode_sum",
    "while it stores the mean": "comm_hooks.exchange.layout.Layout.store",
}


def catch_and_go_on(setup: str, target: str) -> dict[str, Any]:
    """Train; one rank fails in the third step, all catch their errors and train on."""
    torch.manual_seed(0)
    model = nn.Sequential(*[nn.Linear(40, 40, bias=False) for _ in range(4)])
    group = dist.new_group(timeout=timedelta(seconds=60))
    step, exchange = SETUPS[setup](model, group)
    torch.manual_seed(dist.get_rank())
    for _ in range(2):
        step()
    begin = time.monotonic()
    message = "nothing"
    try:
        with failing(model, target):
            exchange.buckets = type(exchange.buckets)(exchange.settings, {})  # made anew
            step()
            step()  # a rank has noticed nothing if the failure came after all messages
    except (LookupError, PeerError) as error:
        message = f"{type(error).__name__}: {error}"
    seconds = time.monotonic() - begin
    after = "trains on"
    try:
        for _ in range(LAST - 3):
            step()
    except (PayloadError, PeerError) as error:
        after = str(error)
    dist.barrier()
    own = torch.cat([p.detach().flatten() for p in model.parameters()])
    every = [torch.empty_like(own) for _ in range(3)]
    dist.all_gather(every, own)
    return {
        "message": message,
        "seconds": seconds,
        "after": after,
        "alike": all(torch.equal(own, other) for other in every),
    }


@pytest.mark.parametrize("setup", SETUPS)
@pytest.mark.parametrize("place", PLACES)
def test_a_rank_that_fails_and_stays_is_named_at_once(
    ranks_of: RanksOf, setup: str, place: str
) -> None:
    outcomes = ranks_of(3).run(catch_and_go_on, setup, PLACES[place])
    for rank, outcome in enumerate(outcomes):
        assert outcome["seconds"] < SOON
        if rank == BAD:
            assert outcome["message"] == "LookupError: no such thing"
        else:
            assert "PeerError" in outcome["message"]
            assert "because rank 1 failed: LookupError: no such thing" in outcome["message"]
    if place in ("before its round", "while it compresses"):
        assert {outcome["after"] for outcome in outcomes} == {"trains on"}
    # Else other ranks may have taken a step that the failed rank has not: they must not go on.
    went_on = [outcome["after"] == "trains on" for outcome in outcomes]
    assert all(went_on) or not any(went_on)
    assert all(outcome["alike"] for outcome in outcomes) == all(went_on)
