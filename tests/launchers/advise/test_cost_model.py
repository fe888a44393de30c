"""The cost model: what it must never say, and a few steps worked out by hand."""

import itertools
import math

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from comm_hooks.collectives.requests import AllGather, AllReduce, AllToAll
from comm_hooks.launchers.advise.cost_model import (
    Collective,
    Link,
    Network,
    Plan,
    Round,
    all_reduce,
    matrix_shapes,
    predict,
    ready_shares,
)

LINK = Link(bandwidth=12.5e6, latency=1e-3)
NETWORK = Network(2, LINK)

seconds = st.floats(0, 10)
collectives = st.builds(
    Collective,
    st.sampled_from([AllReduce, AllGather, AllToAll]),
    st.integers(0, 10**9),
)
rounds = st.builds(
    Round,
    st.lists(collectives, min_size=1, max_size=3).map(tuple),
    seconds,
    seconds,
    st.floats(0, 1),
)
plans = st.builds(
    Plan,
    st.lists(rounds, max_size=4).map(tuple),
    st.lists(rounds, max_size=3).map(tuple),
    st.integers(1, 8),
    st.none() | seconds,
)
networks = st.builds(
    Network,
    st.integers(2, 4096),
    st.builds(Link, st.floats(1e4, 1e10), st.floats(0, 0.1)),
    st.just(1),
    st.sampled_from(["gloo", "nccl"]),
)


def on_the_wire(plan: Plan, network: Network) -> float:
    def total(each: Round) -> float:
        return sum(collective.seconds(network) for collective in each.collectives)

    return sum(map(total, plan.hook_rounds)) + sum(map(total, plan.optimizer_rounds)) / plan.steps


@given(plans, seconds, seconds, networks)
def test_a_step_takes_at_least_each_part_and_at_most_all(
    plan: Plan, forward_backward: float, optimizer: float, network: Network
) -> None:
    step = predict(plan, network, forward_backward=forward_backward, optimizer=optimizer)
    slack = 1e-9 * (1 + step)
    wire = on_the_wire(plan, network)
    own = optimizer if plan.optimizer is None else plan.optimizer
    arithmetic = forward_backward + own + plan.codec
    assert max(arithmetic, wire) - slack <= step <= arithmetic + wire + slack


@given(plans, seconds, networks, st.floats(1, 100), st.floats(0, 0.1))
def test_a_better_link_is_never_slower(
    plan: Plan, forward_backward: float, network: Network, factor: float, less: float
) -> None:
    link = network.link
    better = Link(link.bandwidth * factor, max(0.0, link.latency - less))
    fast = Network(network.ranks, better, backend=network.backend)
    here, there = (predict(plan, n, forward_backward=forward_backward) for n in (network, fast))
    assert there <= here + 1e-9 * (1 + here)


@pytest.mark.parametrize("ranks", [2, 3, 8])
def test_an_all_reduce_sends_its_payload_twice_but_for_a_share(ranks: int) -> None:
    assert all_reduce(1000, ranks).traffic == 2 * (ranks - 1) * 1000 // ranks


def test_a_transfer_takes_its_bytes_and_its_rounds() -> None:
    # 0.93 of 12.5 MB/s is 11.625 MB/s; a ring of 2 has 2 rounds, one of 4 has 6.
    assert Collective(AllReduce, 11_625_000).seconds(NETWORK) == pytest.approx(1.002)
    assert Collective(AllReduce, 11_625_000).seconds(Network(4, LINK)) == pytest.approx(1.006)
    assert Collective(AllGather, 11_375_000).seconds(NETWORK) == pytest.approx(1.001)
    assert Collective(AllGather, 11_625_000).seconds(Network(4, LINK)) == pytest.approx(1.003)
    assert Collective(AllToAll, 10_250_000).seconds(Network(4, LINK)) == pytest.approx(1.001)
    # NCCL: the whole link, and a tree: twice 3 rounds for 8 ranks.
    nccl = Network(8, LINK, backend="nccl")
    assert Collective(AllReduce, 12_500_000).seconds(nccl) == pytest.approx(1.006)
    assert Collective(AllReduce, 10**9).seconds(Network(1, LINK)) == 0


def test_nodes_share_their_links() -> None:
    network = Network(8, LINK, ranks_per_node=4)
    alone = Network(8, LINK)
    # A ring enters and leaves each node once; in an all-to-all 4 ranks each send to 4 outside.
    for same in (Collective(AllReduce, 10**7), Collective(AllGather, 10**7)):
        assert same.seconds(network) == same.seconds(alone)
    scattered = Collective(AllToAll, 7 * 10**6)
    assert scattered.seconds(network) - LINK.latency == pytest.approx(
        16 / 7 * (scattered.seconds(alone) - LINK.latency)
    )


def test_early_buckets_travel_during_the_backward_pass() -> None:
    """Forward ends at 1 s, backward at 3 s; one bucket is ready in the middle, at 2 s."""

    def step(first: int, last: int, **more: float) -> float:
        sizes = (int(first * 11.625e6), int(last * 11.625e6))
        buckets = zip(sizes, (0.5, 1.0), strict=True)
        network = Network(2, Link(12.5e6, 0.0))
        hook_rounds = tuple(
            Round((Collective(AllReduce, size),), ready=ready, **more) for size, ready in buckets
        )
        return predict(Plan(hook_rounds), network, forward_backward=3.0)

    assert step(1, 0) == pytest.approx(3)  # over when the backward pass is
    assert step(4, 0) == pytest.approx(6)
    assert step(1, 4) == pytest.approx(7)
    assert step(2, 4) == pytest.approx(8)  # the second waits until 4 s
    # Encoding the first delays everything, decoding it what comes after; the last's is at the end.
    assert step(1, 1, encode=0.25, decode=0.125) == pytest.approx(3 + 0.5 + 0.125 + 1 + 0.125)


def test_rounds_of_the_optimizer_are_spread_over_its_steps() -> None:
    wire = Collective(AllReduce, 11_625_000)
    plan = Plan(optimizer_rounds=(Round((wire,)),), steps=8, optimizer=0.1)
    assert predict(plan, NETWORK, forward_backward=1.0, optimizer=0.05) == pytest.approx(
        1.1 + 1.002 / 8
    )
    assert plan.traffic == 11_625_000 / 8


@given(st.integers(1, 10**8))
def test_a_number_of_parameters_becomes_matrices(numel: int) -> None:
    shapes = matrix_shapes(numel)
    assert sum(map(math.prod, shapes)) == numel
    assert all(dimension > 0 for shape in shapes for dimension in shape)
    if numel >= 64 * 32 * 32:
        # Enough to be cut into fragments and buckets, and hardly anything outside of matrices.
        assert len(shapes) >= 64
        assert sum(shape[0] for shape in shapes if len(shape) == 1) < 0.05 * numel


@pytest.mark.parametrize(("given", "first", "cap"), [(None, 1, 25), (3, 3, 3)])
def test_buckets_are_those_of_ddp(given: int | None, first: int, cap: int) -> None:
    torch.manual_seed(0)
    widths = [512, *(256 * (1 + i % 3) for i in range(9))]
    layers = [nn.Linear(*pair, bias=pair[0] > 256) for pair in itertools.pairwise(widths)]
    model = nn.Sequential(*layers)
    seen: list[list[int]] = []

    def hook(
        state: object,
        bucket: dist.GradBucket,  # type: ignore[name-defined]
    ) -> torch.futures.Future[torch.Tensor]:
        if bucket.index() == 0:
            seen.clear()
        seen.append([p.numel() for p in bucket.parameters()])
        future: torch.futures.Future[torch.Tensor] = torch.futures.Future()
        future.set_result(bucket.buffer())
        return future

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        ddp = DistributedDataParallel(model, bucket_cap_mb=given)
        ddp.register_comm_hook(None, hook)
        for _ in range(3):  # buckets are made anew after the first step
            ddp(torch.ones(1, 512)).sum().backward()
    finally:
        dist.destroy_process_group()
    numels = [p.numel() for p in model.parameters()]
    buckets = ready_shares([4 * n for n in numels], first << 20, cap << 20)
    assert len(buckets) > 1
    assert [sum(numels[::-1][i] for i in members) for members, _ in buckets] == list(map(sum, seen))
