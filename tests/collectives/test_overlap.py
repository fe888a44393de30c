"""Rounds that go on beside backward: their results, their order, their errors, and their end."""

import gc
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from datetime import timedelta
from functools import partial
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from comm_hooks import ErrorFeedback, Exchange, Identity, Sign, TopK, register
from comm_hooks.collectives import Simulated, TorchDistributed
from comm_hooks.collectives.gloo import GlooRanks
from comm_hooks.collectives.requests import AllGather, AllToAll, Round, ask
from comm_hooks.exchange.layout import Segment
from tests.ranks import RanksOf

# What each asks of the network: one collective, two, and four among parts of the ranks.
SETTINGS: dict[str, dict[str, Any]] = {
    "all_reduce": {"compressor": Identity(), "collective": "all_reduce"},
    "all_gather": {"compressor": TopK(density=0.1), "collective": "all_gather"},
    "sharded": {"compressor": Sign(), "collective": "sharded"},
    "hierarchical": {
        "compressor": TopK(density=0.1),
        "collective": "hierarchical",
        "ranks_per_node": 2,
    },
}
CPU = torch.device("cpu")
BUCKETS, STEPS = 6, 3
WAIT = timedelta(seconds=60)


def gradients(rank: int, step: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(100 * step + rank)
    return [torch.randn(48, 40 + b, generator=generator) for b in range(BUCKETS)]


def rounds(exchange: Exchange, buckets: list[torch.Tensor]) -> Iterator[Round[None]]:
    for index, bucket in enumerate(buckets):
        segment = Segment(f"w{index}", tuple(bucket.shape), False)
        yield exchange.bucket_round(exchange.buckets.of_segments([segment], CPU), [bucket])


def note(order: list[int], index: int, future: torch.futures.Future[None]) -> None:
    order.append(index)


def overlapped(name: str) -> tuple[list[list[torch.Tensor]], list[list[int]], bool]:
    """Start all rounds of a step, with collectives of the program's own in between.

    Return the results, in which order the futures of each step were complete, and whether the
    program's collectives met their partners.
    """
    exchange = Exchange(**SETTINGS[name], memory=ErrorFeedback())
    jitter = torch.Generator().manual_seed(dist.get_rank())
    results, orders, own_met = [], [], True
    for step in range(STEPS):
        buckets = gradients(dist.get_rank(), step)
        futures: list[torch.futures.Future[None]] = []
        order: list[int] = []
        for index, round_ in enumerate(rounds(exchange, buckets)):
            time.sleep(0.01 * float(torch.rand(1, generator=jitter)))
            future = exchange.transport.run_async(round_)
            future.add_done_callback(partial(note, order, index))
            futures.append(future)
            own = torch.full((3,), float(index))
            dist.all_reduce(own)
            own_met &= bool((own == index * dist.get_world_size()).all())
        for future in futures:
            future.wait()
        # Whoever waits may be woken before the callback is called.
        deadline = time.monotonic() + 10
        while len(order) < BUCKETS and time.monotonic() < deadline:
            time.sleep(0.001)
        exchange.end_step()
        results.append(buckets)
        orders.append(order)
    return results, orders, own_met


@pytest.mark.parametrize(
    ("ranks", "name"),
    [
        *((2, name) for name in ("all_reduce", "all_gather")),
        (3, "sharded"),
        (4, "hierarchical"),
    ],
)
def test_overlapped_rounds_give_what_a_simulated_world_gives(
    ranks_of: RanksOf, ranks: int, name: str
) -> None:
    world = Simulated(ranks)
    exchanges = [Exchange(**SETTINGS[name], memory=ErrorFeedback(), transport=t) for t in world]
    expected = []
    for step in range(STEPS):
        buckets = [gradients(rank, step) for rank in range(ranks)]
        per_rank = [rounds(e, b) for e, b in zip(exchanges, buckets, strict=True)]
        for _ in range(BUCKETS):
            world.run([next(of_rank) for of_rank in per_rank])
        for exchange in exchanges:
            exchange.end_step()
        expected.append(buckets[0])
    for results, orders, own_met in ranks_of(ranks).run(overlapped, name):
        for actual, wanted in zip(results, expected, strict=True):
            for mine, theirs in zip(actual, wanted, strict=True):
                # gloo's ring adds up in another order than a simulated world.
                tolerance = 1e-6 if name == "all_reduce" else 0.0
                torch.testing.assert_close(mine, theirs, rtol=0, atol=tolerance)
        assert own_met
        if name in ("sharded", "hierarchical"):
            assert orders == [list(range(BUCKETS))] * STEPS


def starts_late(name: str) -> bool:
    """Rank 0 begins its rounds only when the others have been given back control."""
    exchange = Exchange(**SETTINGS[name], memory=ErrorFeedback())
    exchange.average_({"w0": torch.randn(48, 40)})
    # The first round beside the caller makes a process group, and the first with each bucket
    # compares the tensors in it: both take everybody.
    for round_ in rounds(exchange, gradients(0, 0)):
        exchange.transport.run_async(round_).wait()
    store, key = dist.distributed_c10d._get_default_store(), f"late {name} {os.getppid()}"
    others = dist.get_world_size() - 1
    if dist.get_rank() == 0:
        store.wait([f"{key} {rank}" for rank in range(1, others + 1)], WAIT)
    started = [exchange.transport.run_async(r) for r in rounds(exchange, gradients(0, 1))]
    pending = not any(future.done() for future in started)
    if dist.get_rank():
        store.set(f"{key} {dist.get_rank()}", "started")
    for future in started:
        future.wait()
    return pending or dist.get_rank() == 0


@pytest.mark.parametrize(
    ("ranks", "name"), [(2, "all_gather"), (3, "sharded"), (4, "hierarchical")]
)
def test_the_caller_goes_on_before_the_others_have_begun(
    ranks_of: RanksOf, ranks: int, name: str
) -> None:
    """Where a request blocked the caller, rank 0 would wait for a word that never comes."""
    assert all(ranks_of(ranks).run(starts_late, name))


def fails_at(request: int) -> list[str]:
    """Drive a round that fails after some reply, between two that do not; return what is said."""

    def round_(fails: bool) -> Round[torch.Tensor]:
        rows = torch.full((dist.get_world_size(), 4), dist.get_rank(), dtype=torch.uint8)
        for index in range(2):
            rows = yield AllToAll(rows)
            if fails and index == request:
                raise ValueError(f"reply {index} is bad")
        return rows

    transport = TorchDistributed()
    futures = [transport.run_async(round_(fails)) for fails in (False, True, False)]
    said = []
    for future in futures:
        try:
            said.append(f"rows of {future.wait()[:, 0].tolist()}")
        except Exception as error:
            said.append(str(error).split("\n")[0].split(": ", 1)[-1])
    return said


@pytest.mark.parametrize("request_", [0, 1])
def test_an_error_reaches_the_caller_and_ends_the_rounds_after_it(
    ranks_of: RanksOf, request_: int
) -> None:
    for rank, (first, failed, later) in enumerate(ranks_of(2).run(fails_at, request_)):
        assert first == f"rows of [{rank}, {rank}]"
        assert f"ValueError: reply {request_} is bad" in failed
        assert f"an earlier exchange failed: ValueError: reply {request_} is bad" in later


def backward_fails() -> str:
    model = DistributedDataParallel(nn.Linear(64, 64), bucket_cap_mb=0.01)
    state = register(model, "sign", collective="sharded", min_numel=16)
    with mock.patch("comm_hooks.exchange.layout.Layout.store", side_effect=ValueError("no room")):
        try:
            model(torch.ones(1, 64)).sum().backward()
        except ValueError as error:  # itself: not what C++ makes of it
            return str(error)
    return f"no error, {state.stats()}"


def test_backward_raises_what_a_round_raises(ranks_of: RanksOf) -> None:
    assert ranks_of(2).run(backward_fails) == ["no room"] * 2


def connect_at_once() -> list[list[int]]:
    """Begin the first round beside the caller and the first one that it waits for."""

    def late(*args: Any) -> Any:
        time.sleep(0.5 * transport.rank)
        return finish(*args)

    transport = TorchDistributed(dist.new_group(timeout=timedelta(seconds=60)))
    rows = torch.full((2, 4), transport.rank, dtype=torch.uint8)
    finish = GlooRanks.run
    with mock.patch.object(GlooRanks, "run", late):
        beside = transport.run_async(ask(AllToAll(rows)))
        time.sleep(0.2 * (1 - transport.rank))
        gathered = transport.perform(AllGather(rows[0]))
        return [gathered[:, 0].tolist(), beside.wait()[:, 0].tolist()]


def test_threads_do_not_wait_for_each_other_in_the_store(ranks_of: RanksOf) -> None:
    assert ranks_of(2).run(connect_at_once) == [[[0, 1], [0, 1]]] * 2


def threads_of_rounds() -> list[threading.Thread]:
    return [t for t in threading.enumerate() if t.name == "comm-hooks rounds"]


def ends_with_its_transport() -> tuple[int, int]:
    gc.collect()
    before = len(threads_of_rounds())
    transport = TorchDistributed()
    transport.run_async(
        ask(AllToAll(torch.zeros(dist.get_world_size(), 4, dtype=torch.uint8)))
    ).wait()
    during = len(threads_of_rounds())
    del transport
    gc.collect()
    deadline = time.monotonic() + 60
    while len(threads_of_rounds()) > before and time.monotonic() < deadline:
        time.sleep(0.01)
    # Fewer than before, if those of another test have ended meanwhile.
    return during - before, max(0, len(threads_of_rounds()) - before)


def test_the_thread_ends_with_its_transport(ranks_of: RanksOf) -> None:
    assert ranks_of(2).run(ends_with_its_transport) == [(1, 0)] * 2


def timeout_of_thread() -> list[timedelta]:
    group = dist.new_group(timeout=timedelta(seconds=1234))
    transport = TorchDistributed(group)
    transport.run_async(
        ask(AllToAll(torch.zeros(dist.get_world_size(), 4, dtype=torch.uint8)))
    ).wait()
    beside = transport._gloo_ranks()
    timeouts = [group._get_backend(CPU).options._timeout, beside._rings._context.options._timeout]
    dist.barrier()  # nobody leaves while others are still connecting
    return timeouts


def test_the_threads_group_gives_up_after_as_long(ranks_of: RanksOf) -> None:
    assert ranks_of(2).run(timeout_of_thread) == [[timedelta(seconds=1234)] * 2] * 2


LIVES = """
import gc, os, sys
import torch, torch.distributed as dist, torch.multiprocessing as mp
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from comm_hooks import register
from comm_hooks.collectives.requests import AllToAll, ask

def train(folder, life, rank):
    dist.init_process_group("gloo", init_method=f"file://{folder}/{life}", rank=rank, world_size=2)
    model = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64))
    model = DistributedDataParallel(model, bucket_cap_mb=0.01)
    state = register(model, "sign", collective="sharded", min_numel=16)
    for _ in range(3):
        model(torch.ones(1, 64)).sum().backward()
    return state

def main(rank, folder):
    torch.set_num_threads(1)
    state = train(folder, 1, rank)
    child = os.fork()
    if not child:
        try:
            state.exchange.transport.run_async(ask(AllToAll(torch.zeros(2, 4, dtype=torch.uint8))))
        except RuntimeError as error:
            state.exchange.transport._worker = None  # what ends the thread has none to end
            gc.collect()
            os._exit(7 if "forked" in str(error) else 1)
    assert os.waitpid(child, 0)[1] >> 8 == 7
    dist.destroy_process_group()
    train(folder, 2, rank)

if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2])
"""


@pytest.mark.slow
def test_a_process_can_fork_train_in_a_second_world_and_simply_end(tmp_path: Any) -> None:
    script = tmp_path / "lives.py"
    script.write_text(LIVES)
    environment = {**os.environ, "GLOO_SOCKET_IFNAME": "lo"}
    ranks = [
        subprocess.Popen(
            [sys.executable, str(script), str(rank), str(tmp_path)],
            env=environment,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    for rank in ranks:
        _, said = rank.communicate(timeout=200)
        assert rank.returncode == 0, said


def start_pairs() -> list[bool]:
    """An all-gather of two ranks: with whom, and is all of it there when the future is complete?"""
    transport = TorchDistributed()
    correct = []
    for size in (1, 7, 1 << 20):
        payload = torch.full((size,), transport.rank + 1, dtype=torch.uint8)
        reply = transport.run_async(ask(AllGather(payload))).wait()
        correct.append(bool((reply == torch.tensor([[1], [2]])).all()) and len(reply[0]) == size)
    return correct


def test_a_gather_of_two_is_complete_when_both_ways_are(ranks_of: RanksOf) -> None:
    assert ranks_of(2).run(start_pairs) == [[True] * 3] * 2
