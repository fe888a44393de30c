"""Ranks as threads: what real ranks compute, in turns, and no end but a common one."""

import threading
from collections.abc import Callable
from functools import partial

import pytest
import torch
from torch import nn

from comm_hooks import CountSketch, ErrorFeedback, Exchange, Sign
from comm_hooks.collectives import TorchDistributed, Transport, run_ranks
from comm_hooks.collectives.requests import AllGather, AllReduce, Request, ask
from comm_hooks.optim.published.one_bit_adam import OneBitAdam
from comm_hooks.optim.rounds.algorithms import SAFL
from tests.ranks import RanksOf


def exchange_of(kind: str, transport: Transport) -> Exchange:
    """An exchange by all-reduce, and one by all-to-all and all-gather."""
    if kind == "one_bit_adam":
        return Exchange(Sign(), ErrorFeedback(), "sharded", transport=transport, min_numel=1)
    return Exchange(CountSketch(ratio=0.2), transport=transport, min_numel=1)


def train(kind: str, transport: Transport) -> list[torch.Tensor]:
    """Six steps of a training loop that never heard of simulated ranks."""
    seeded = torch.Generator().manual_seed(transport.rank)
    model = nn.Linear(12, 9)
    with torch.no_grad():
        model.weight.copy_(torch.linspace(-1, 1, 108).view(9, 12))
        model.bias.zero_()
    exchange = exchange_of(kind, transport)
    optimizer: OneBitAdam | SAFL
    if kind == "one_bit_adam":
        optimizer = OneBitAdam(model.named_parameters(), exchange, lr=0.01, freeze_step=2)
    else:
        optimizer = SAFL(model.named_parameters(), exchange, lr=0.01, local_steps=2)
    for _ in range(6):
        model(torch.randn(4, 12, generator=seeded)).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    return [p.detach().clone() for p in model.parameters()]


def train_over_gloo(kind: str) -> list[torch.Tensor]:
    return train(kind, TorchDistributed())


@pytest.mark.parametrize("kind", ["one_bit_adam", pytest.param("safl", marks=pytest.mark.slow)])
def test_training_equals_that_of_real_ranks(kind: str, ranks_of: RanksOf) -> None:
    expected = ranks_of(2).run(train_over_gloo, kind)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # as the real ranks have: sums of another shape round otherwise
    try:
        actual = run_ranks(partial(train, kind), 2)
    finally:
        torch.set_num_threads(threads)
    for parameters, others in zip(expected, actual, strict=True):
        for parameter, other in zip(parameters, others, strict=True):
            assert torch.equal(parameter, other)
    assert not torch.equal(actual[0][0], torch.linspace(-1, 1, 108).view(9, 12))


def test_ranks_take_turns() -> None:
    order: list[int] = []
    running: list[int] = []

    def rank(transport: Transport) -> str:
        for _ in range(3):
            assert not running
            running.append(transport.rank)
            order.append(transport.rank)
            running.clear()
            transport.perform(AllReduce(torch.ones(1)))
        return f"rank {transport.rank} of {transport.world_size}"

    assert run_ranks(rank, 3) == ["rank 0 of 3", "rank 1 of 3", "rank 2 of 3"]
    assert order == [0, 1, 2] * 3


def test_futures_hold_the_reply() -> None:
    def rank(transport: Transport) -> torch.Tensor:
        return transport.run_async(ask(AllReduce(torch.tensor([float(transport.rank)])))).wait()

    assert run_ranks(rank, 4) == [torch.tensor([6.0])] * 4


def test_gradients_are_on_even_where_the_caller_has_turned_them_off() -> None:
    with torch.no_grad():
        assert run_ranks(lambda _: torch.is_grad_enabled(), 2) == [True, True]


@pytest.mark.parametrize(("failing", "after"), [(0, 0), (1, 2), (2, 1)])
def test_one_rank_that_fails_ends_all(failing: int, after: int) -> None:
    ended: list[int] = []
    passed: list[int] = []

    def rank(transport: Transport) -> None:
        try:
            for round_ in range(3):
                if round_ == after and transport.rank == failing:
                    raise OSError(f"rank {failing} is out of paper")
                try:
                    transport.perform(AllReduce(torch.ones(1)))
                    passed.append(transport.rank)
                except Exception:
                    # Handling what goes wrong in a round must not keep a rank alive.
                    continue
        finally:
            ended.append(transport.rank)

    before = threading.active_count()
    with pytest.raises(OSError, match=f"rank {failing} is out of paper"):
        run_ranks(rank, 3)
    assert threading.active_count() == before
    started = range(failing + 1) if after == 0 else range(3)
    assert sorted(ended) == list(started)
    # Ranks whose turn comes after the failing one's get no reply of the round before.
    replied = [0, 1, 2] * (after - 1) + list(range(failing + 1)) * (after > 0)
    assert sorted(passed) == sorted(replied)


def test_a_rank_that_will_not_end_is_ended_again() -> None:
    def rank(transport: Transport) -> None:
        if transport.rank == 1:
            raise OSError("out of paper")
        for _ in range(2):
            try:
                transport.perform(AllReduce(torch.ones(1)))
            except BaseException:
                continue

    before = threading.active_count()
    with pytest.raises(OSError, match="out of paper"):
        run_ranks(rank, 2)
    assert threading.active_count() == before


def differ(transport: Transport) -> None:
    request: Request = AllReduce(torch.ones(1))
    if transport.rank == 1:
        request = AllGather(torch.ones(1))
    transport.perform(request)


def leave_early(transport: Transport) -> None:
    if transport.rank == 0:
        transport.perform(AllReduce(torch.ones(1)))


@pytest.mark.parametrize("function", [differ, leave_early])
def test_ranks_that_diverge_are_told_instead_of_hanging(
    function: Callable[[Transport], None],
) -> None:
    before = threading.active_count()
    with pytest.raises(RuntimeError, match="ranks diverged"):
        run_ranks(function, 3)
    assert threading.active_count() == before


def test_no_ranks_are_refused() -> None:
    with pytest.raises(ValueError, match="world_size must be an integer of at least 1, got 0"):
        run_ranks(leave_early, 0)
