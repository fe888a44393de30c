"""A run that goes on with another number of ranks loses nothing of what was still to be sent."""

import math
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from comm_hooks import Differences, ErrorFeedback, Exchange, MomentumCorrection, Sign, TopK
from comm_hooks.collectives import Simulated
from comm_hooks.exchange.saved_state import seal_own
from comm_hooks.optim import LocalVarianceAdam
from tests.worlds import Accounts as World


@settings(max_examples=5)
@given(
    st.integers(1, 5), st.integers(1, 5), st.sampled_from([32, 16, 4]),
    st.sampled_from(["sharded", "all_gather", "auto"]),
    st.sampled_from(["sharded", "all_gather", "auto"]),
    st.sampled_from(["parameter", "bucket"]), st.sampled_from(["parameter", "bucket"]),
)  # fmt: skip
# As many ranks, but "auto" has no shards on two of them.
@example(2, 2, 32, "sharded", "auto", "parameter", "parameter")
@pytest.mark.filterwarnings("ignore:world size is 1")
def test_nothing_is_lost_on_another_number_of_ranks(
    before: int,
    after: int,
    bits: int,
    collective: str,
    other: str,
    granularity: str,
    other_granularity: str,
) -> None:
    torch.manual_seed(before * 7 + after)
    world = World(before, lambda: ErrorFeedback(bits), collective, granularity=granularity)
    world.average(4)
    resumed = World(after, lambda: ErrorFeedback(bits), other, granularity=other_granularity)
    resumed.average(1)  # what it remembers by now is replaced
    resumed.resume(world)
    assert all(exchange.step == 4 for exchange in resumed.exchanges)
    resumed.average(12, silent=True)
    # All residuals have been sent, but for their rounding.
    assert resumed.missing() < {32: 1e-5, 16: 0.03, 4: 0.3}[bits]


@pytest.mark.filterwarnings("ignore:world size is 1")
@pytest.mark.parametrize("after", [1, 2, 4])
def test_receivers_still_believe_the_same(after: int) -> None:
    """Differences: the mean of the estimates is what the receivers have added up."""
    world = World(3, Differences)
    world.average(5)
    resumed = World(after, Differences)
    resumed.resume(world)
    for exchange in resumed.exchanges:
        for name, estimate in exchange.state_dict()["memory"].items():
            expected = world.received[name].flatten()
            torch.testing.assert_close(estimate.double(), expected, rtol=0, atol=1e-5)


@pytest.mark.filterwarnings("ignore:world size is 1")
def test_velocities_are_averaged_and_what_waits_is_kept() -> None:
    world = World(3, MomentumCorrection)
    world.average(3)
    memories = [exchange.state_dict()["memory"] for exchange in world.exchanges]
    servers = [exchange.state_dict()["server_memory"] for exchange in world.exchanges]
    resumed = World(2, MomentumCorrection)
    resumed.resume(world)
    for exchange in resumed.exchanges:
        state = exchange.state_dict()["memory"]
        assert set(state) == set(memories[0])
        for name in ("a", "b", "c"):
            velocity = sum(m[f"velocity.{name}"] for m in memories) / 3
            unsent = torch.cat([s[name] for s in servers])[: velocity.numel()]
            residual = sum(m[f"residual.{name}"] for m in memories) / 3 + unsent
            torch.testing.assert_close(state[f"velocity.{name}"], velocity)
            torch.testing.assert_close(state[f"residual.{name}"], residual)


def test_as_many_ranks_load_their_own() -> None:
    world = World(3, ErrorFeedback)
    world.average(3)
    resumed = World(3, ErrorFeedback)
    resumed.resume(world)
    for ours, theirs in zip(resumed.exchanges, world.exchanges, strict=True):
        for part in ("memory", "server_memory"):
            saved = theirs.state_dict()[part]
            assert all(torch.equal(v, saved[k]) for k, v in ours.state_dict()[part].items())
            assert set(ours.state_dict()[part]) == set(saved)


def test_one_state_with_shards_is_refused_where_there_are_none() -> None:
    world = World(2, ErrorFeedback, "sharded")
    world.average(2)
    state = world.exchanges[0].state_dict()
    for collective in ("all_gather", "auto"):
        other = World(2, ErrorFeedback, collective).exchanges[0]
        with pytest.raises(ValueError, match="has residuals of shards, and was saved"):
            other.load_state_dict(state)


def test_resuming_twice_without_a_round_between_changes_nothing() -> None:
    world = World(2, ErrorFeedback)
    world.average(3)
    once = World(4, ErrorFeedback)
    once.resume(world)
    twice = World(3, ErrorFeedback)
    twice.resume(once)
    expected = once.exchanges[0].state_dict()["memory"]
    for name, row in twice.exchanges[2].state_dict()["memory"].items():
        torch.testing.assert_close(row, expected[name])


def test_a_rank_that_lacks_a_parameter_remembers_zeros_of_it() -> None:
    world = World(2, ErrorFeedback, "all_gather")
    world.average(2)
    states = [exchange.state_dict() for exchange in world.exchanges]
    expected = states[0]["memory"]["a"] / 2
    del states[1]["memory"]["a"]
    states[1] = seal_own(states[1])
    exchange = World(3, ErrorFeedback, "all_gather").exchanges[1]
    exchange.load_state_dicts(states)
    torch.testing.assert_close(exchange.state_dict()["memory"]["a"], expected)


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda states: [], "no states were given"),
        (lambda states: states[:2], r"in rank order, got ranks \[0, 1\] of 3"),
        (lambda states: states[::-1], r"in rank order, got ranks \[2, 1, 0\] of 3"),
        (lambda states: [*states[:2], {**states[2], "step": 9}], r"different steps: \[2, 2, 9\]"),
        (
            lambda states: [*states[:2], {k: v for k, v in states[2].items() if k != "memory"}],
            "the state was saved without a memory",
        ),
        (
            lambda states: [
                {**s, "memory": {n: row.half() for n, row in s["memory"].items()}} for s in states
            ],
            "is torch.float16, but ErrorFeedback",
        ),
        (
            lambda states: [{**s, "numels": {**s["numels"], "a": 4}} for s in states],
            "'a' has .* elements, but the parameter needs",
        ),
        (lambda states: [{**s, "numels": [1]} for s in states], "numels must be a dictionary of"),
        (
            lambda states: [{**s, "ranks_per_node": 2} for s in states],
            "nodes of 2 cannot have been",
        ),
        (
            lambda states: [{k: v for k, v in s.items() if k != "numels"} for s in states],
            "it has no numels",
        ),
    ],
)
def test_states_that_cannot_be_right_are_refused(
    spoil: Callable[[list[dict[str, object]]], list[dict[str, object]]], message: str
) -> None:
    world = World(3, ErrorFeedback)
    world.average(2)
    exchange = World(2, ErrorFeedback).exchanges[0]
    states = [seal_own(state) for state in spoil([e.state_dict() for e in world.exchanges])]
    with pytest.raises(ValueError, match=message):
        exchange.load_state_dicts(states)
    assert exchange.step == 0
    assert exchange.state_dict()["memory"] == {}


@pytest.mark.filterwarnings("ignore:world size is 1")
def test_an_exchange_without_memory_resumes_on_any_number() -> None:
    world = Simulated(2)
    before = [Exchange(Sign(), None, transport=transport) for transport in world]
    for exchange in before:
        exchange.step = 5
    exchange = Exchange(Sign(), None, transport=Simulated(1)[0])
    exchange.load_state_dicts([e.state_dict() for e in before])
    assert exchange.step == 5


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda s: None, "must be what state_dict() returned, got NoneType"),
        (lambda s: [], "must be what state_dict() returned, got list"),
        (lambda s: {}, "the state has no seal"),
        (lambda s: {**s, "seal": 5}, "the state has no seal"),
        (lambda s: {**s, "step": None}, "the state is damaged"),
        (lambda s: {k: v for k, v in s.items() if k != "numels"}, "the state is damaged"),
        (lambda s: {**s, "memory": {**s["memory"], "a": object()}}, "the state is damaged"),
        (lambda s: {**s, "memory": {n: r + 1 for n, r in s["memory"].items()}}, "is damaged"),
        (lambda s: seal_own({"step": 1}), "the state is not one of an exchange: it has no rank"),
        (
            lambda s: seal_own({**s, "memory": {"a": torch.full((660,), math.inf)}}),
            "residual of 'a' is not finite",
        ),
        (
            lambda s: seal_own({**s, "memory_type": "MomentumCorrection"}),
            "saved with 'MomentumCorrection', but this exchange has 'ErrorFeedback'",
        ),
    ],
)
def test_what_is_damaged_or_of_another_kind_is_refused_and_changes_nothing(
    spoil: Callable[[dict[str, Any]], Any], message: str
) -> None:
    world = World(2, ErrorFeedback, "all_gather")
    world.average(2)
    exchange = world.exchanges[0]
    before, other = exchange.state_dict(), world.exchanges[1].state_dict()
    with pytest.raises(ValueError, match=re.escape(message)):
        exchange.load_state_dict(spoil(exchange.state_dict()))
    with pytest.raises(ValueError, match=re.escape(message)):
        exchange.load_state_dicts([spoil(exchange.state_dict()), other])
    assert exchange.state_dict()["seal"] == before["seal"]


@given(bit=st.integers(0, 10**6))
def test_no_flipped_bit_of_a_residual_is_loaded(bit: int) -> None:
    world = World(2, ErrorFeedback, "all_gather")
    world.average(1)
    state = world.exchanges[0].state_dict()
    row = state["memory"]["c"].view(torch.int32)
    row[bit // 32 % len(row)] ^= torch.tensor(1 << 31 if bit % 32 == 31 else 1 << bit % 32).int()
    with pytest.raises(ValueError, match="the state is damaged"):
        world.exchanges[0].load_state_dict(state)


def test_residuals_of_parameters_that_the_owner_lacks_are_refused() -> None:
    exchange = Exchange(TopK(0.3), ErrorFeedback(), min_numel=1, transport=Simulated(1)[0])
    optimizer = LocalVarianceAdam([("here", torch.nn.Parameter(torch.ones(4, 8)))], exchange)
    other = World(1, ErrorFeedback, "all_gather")
    with pytest.warns(UserWarning, match="world size is 1"):
        other.average(1)
    with pytest.raises(ValueError, match="parameters that this model does not have: a, b, c"):
        optimizer.exchange.load_state_dict({**other.exchanges[0].state_dict()})
