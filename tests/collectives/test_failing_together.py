"""A rank that fails and goes on, or ends, lets no other rank wait, and is the one that is named."""

import os
import signal
import socket
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

from comm_hooks import ConfigMismatchError, Exchange, PayloadError, PeerError, Sign, register
from comm_hooks.collectives import TorchDistributed
from comm_hooks.collectives.requests import AllReduce, AllToAll
from comm_hooks.optim import LocalVarianceAdam, low_communication
from tests.ranks import CONTEXT, RanksOf

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
    except (ConfigMismatchError, PayloadError, PeerError) as error:
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


def wait_for_a_rank_that_keeps_its_connections() -> float:
    """Return the seconds that a rank waits after another one has failed."""
    transport = TorchDistributed(dist.new_group(timeout=timedelta(seconds=60)))
    payload = torch.ones(4)
    transport.perform(AllToAll(payload.expand(2, 4)))
    begin = time.monotonic()
    if dist.get_rank() == 0:
        with pytest.raises(PeerError, match="rank 1 failed: LookupError"):
            transport.perform(AllReduce(payload))
    else:
        kept = transport._gloo._rings  # as a traceback would
        transport.report(LookupError("no such thing"))
        with pytest.raises(RuntimeError, match="were closed"):
            kept.all_reduce_(payload)
        time.sleep(2.0)
    return time.monotonic() - begin


def test_connections_end_with_their_epoch_whoever_refers_to_them(ranks_of: RanksOf) -> None:
    assert ranks_of(2).run(wait_for_a_rank_that_keeps_its_connections)[0] < 2.0


TIMEOUT = 5.0
Rank = Callable[[int, int], None]


def exchange_until_one_ends(rank: int, port: int) -> None:
    """Train; rank 2 ends in the middle of a step."""
    join(rank, port, 4, 60.0)
    torch.manual_seed(0)
    model = nn.Sequential(*[nn.Linear(40, 40, bias=False) for _ in range(4)])
    step, _ = with_hook(model, dist.group.WORLD)  # type: ignore[arg-type]
    for _ in range(3):
        step()
    if rank == 2:
        with mock.patch(PLACES["while it decodes"], side_effect=lambda *_, **__: os._exit(1)):
            step()
    step()
    step()


def stop_before_the_first_exchange(rank: int, port: int) -> None:
    """Exchange over TCP; rank 0, which keeps the store, is stopped before."""
    join(rank, port, 3, TIMEOUT)
    exchange = Exchange(Sign(), min_numel=1)
    dist.barrier()
    if rank == 0:
        os.kill(os.getpid(), signal.SIGSTOP)
    exchange.average_({"weight": torch.ones(8, 8)})


def join(rank: int, port: int, ranks: int, timeout: float) -> None:
    limit = timedelta(seconds=timeout)
    store = dist.TCPStore("127.0.0.1", port, ranks, rank == 0, limit)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=ranks, timeout=limit)


def tell(function: Rank, rank: int, port: int, said: Any) -> None:
    begin = time.monotonic()
    try:
        function(rank, port)
    except PeerError as error:
        said.put((rank, str(error), time.monotonic() - begin))
    said.close()
    said.join_thread()
    os._exit(0)  # threads may wait for the store


def told_by(function: Rank, ranks: int, speakers: int) -> list[tuple[int, str, float]]:
    """Run processes; return what so many of them say, and after how many seconds."""
    said = CONTEXT.Queue()
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port = found.getsockname()[1]
    processes = [
        CONTEXT.Process(target=tell, args=(function, rank, port, said)) for rank in range(ranks)
    ]
    for process in processes:
        process.start()
    try:
        return [said.get(timeout=60) for _ in range(speakers)]
    finally:
        for process in processes:
            process.kill()
            process.join()


def test_all_that_are_left_name_the_one_that_has_ended() -> None:
    for _, message, seconds in told_by(exchange_until_one_ends, 4, 3):
        assert "because rank 2 did not take part: ended, stopped" in message
        assert seconds < 30


@pytest.mark.slow
def test_a_rank_that_keeps_the_store_may_be_stopped() -> None:
    for _, message, seconds in told_by(stop_before_the_first_exchange, 3, 2):
        assert "the key-value store of the process group does not answer" in message
        assert seconds < TIMEOUT + 25
