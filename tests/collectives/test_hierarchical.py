"""Full precision inside nodes, compressed between them: nothing is lost, everybody agrees."""

import os
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from comm_hooks import (
    CompressionState,
    ConfigMismatchError,
    CountSketch,
    Differences,
    ErrorFeedback,
    Exchange,
    Identity,
    MomentumCorrection,
    PermK,
    Sign,
    TopK,
    register,
)
from comm_hooks.collectives import Simulated, TorchDistributed
from comm_hooks.compressors import Compressor
from comm_hooks.exchange.layout import Segment
from comm_hooks.exchange.routes.hierarchical import Hierarchical
from comm_hooks.exchange.saved_state import seal_own
from tests.ranks import RanksOf
from tests.worlds import SHAPES, Accounts, MakeMemory, Tensors


def nodes_of(
    nodes: int,
    ranks_per_node: int | None,
    memory: MakeMemory = ErrorFeedback,
    compressor: Compressor | None = None,
    granularity: str = "parameter",
) -> Accounts:
    """Return simulated nodes, or without ranks per node as many ranks."""
    collective = "hierarchical" if ranks_per_node else "auto"
    options = {"granularity": granularity, "ranks_per_node": ranks_per_node}
    return Accounts(nodes * (ranks_per_node or 1), memory, collective, compressor, **options)


quietly = pytest.mark.filterwarnings("ignore:world size is 1", "ignore:all ranks are on one node")
divisions = st.tuples(st.integers(1, 4), st.integers(1, 3))
granularities = st.sampled_from(["parameter", "bucket"])


@quietly
@settings(max_examples=5)
@given(
    divisions,
    st.sampled_from([TopK(0.3, block_size=64), Sign(64), CountSketch(0.5), PermK()]),
    granularities,
)
def test_everybody_agrees_and_the_mean_is_right(
    division: tuple[int, int], compressor: Compressor, granularity: str
) -> None:
    torch.manual_seed(0)
    memory = ErrorFeedback if compressor.contractive else lambda: None
    world = nodes_of(*division, memory, compressor, granularity)
    world.average(2)
    torch.testing.assert_close(world.received["norm"], world.given["norm"], rtol=0, atol=1e-5)
    exact = nodes_of(*division, lambda: None, Identity())
    exact.average(2)
    assert exact.missing() < 1e-6
    if division[0] == 1:
        assert world.missing() < 1e-6, "within one node nothing is compressed"


@quietly
@settings(max_examples=3)
@given(divisions, st.sampled_from([32, 16, 4]), granularities)
def test_nothing_is_lost(division: tuple[int, int], bits: int, granularity: str) -> None:
    torch.manual_seed(1)
    world = nodes_of(*division, lambda: ErrorFeedback(bits), granularity=granularity)
    world.average(4)
    assert division[0] == 1 or world.missing() > 0.1, "compression must have kept something back"
    world.average(12, silent=True)
    assert world.missing() < {32: 1e-5, 16: 0.03, 4: 0.3}[bits]


@quietly
@settings(max_examples=3)
@given(divisions, st.one_of(divisions, st.tuples(st.integers(1, 4), st.none())), st.booleans())
def test_nothing_is_lost_with_other_nodes(
    before: tuple[int, int], after: tuple[int, int | None], backwards: bool
) -> None:
    """From any division into nodes to any other, or to none at all and back."""
    torch.manual_seed(2)
    old, new = (after, before) if backwards else (before, after)
    world = nodes_of(*old)
    world.average(4)
    resumed = nodes_of(*new)
    resumed.average(1)  # what it remembers by now is replaced
    resumed.resume(world)
    assert all(exchange.step == 4 for exchange in resumed.exchanges)
    resumed.average(12, silent=True)
    assert resumed.missing() < 1e-5


@pytest.mark.parametrize("ranks_per_node", [1, 2, None])
def test_receivers_still_believe_the_same(ranks_per_node: int | None) -> None:
    """Differences: the mean of the estimates is what the receivers have added up."""
    world = nodes_of(2, 3, Differences)
    world.average(4)
    resumed = nodes_of(2, ranks_per_node, Differences)
    resumed.resume(world)
    count = ranks_per_node or 1
    for rank, exchange in enumerate(resumed.exchanges):
        for name, estimate in exchange.state_dict()["memory"].items():
            start = rank % count * estimate.numel()
            wanted = world.received[name].flatten()[start : start + estimate.numel()]
            actual = estimate[: wanted.numel()].double()
            torch.testing.assert_close(actual, wanted, rtol=0, atol=1e-5)


def test_what_waits_and_its_velocity_are_kept() -> None:
    world = nodes_of(2, 2, MomentumCorrection)
    world.average(3)
    back = nodes_of(2, 2, MomentumCorrection)
    back.resume(world)
    for ours, theirs in zip(back.exchanges, world.exchanges, strict=True):
        memory = ours.state_dict()["memory"]
        rows = theirs.state_dict()["memory"]
        assert all(torch.equal(memory[key], row) for key, row in rows.items())
    flat = nodes_of(1, None, MomentumCorrection)
    flat.resume(world)
    memory = flat.exchanges[0].state_dict()["memory"]
    for key in (f"{kind}.{name}" for kind in ("velocity", "residual") for name in "abcd"):
        rows = [exchange.state_dict()["memory"][key] for exchange in world.exchanges]
        wanted = torch.cat([(rows[0] + rows[2]) / 2, (rows[1] + rows[3]) / 2])
        torch.testing.assert_close(memory[key], wanted[: memory[key].numel()])


def test_one_infinite_element_spoils_all_and_changes_no_memory() -> None:
    world = nodes_of(2, 2)
    world.average(2)
    before = [exchange.state_dict()["memory"] for exchange in world.exchanges]
    gradients = [{n: torch.randn(s) for n, s in SHAPES.items()} for _ in range(4)]
    gradients[3]["b"][0, 0] = torch.inf
    world.run(gradients)
    assert all(g.isnan().all() for own in gradients for g in own.values())
    for exchange, memory in zip(world.exchanges, before, strict=True):
        after = exchange.state_dict()["memory"]
        assert all(torch.equal(after[name], row) for name, row in memory.items())


def test_bytes_are_counted_where_they_travel() -> None:
    sent = {"node": 0, "across": 0}

    def perform(self: Simulated, requests: Any) -> Any:
        group = requests[0].group
        if group:
            members = group.members(0, self.world_size)
            sent[group.kind] += requests[0].traffic(len(members))
        return original(self, requests)

    original = Simulated._perform
    world = nodes_of(2, 2)
    with mock.patch.object(Simulated, "_perform", perform):
        world.average(3)
    for exchange in world.exchanges:
        stats = exchange.stats()
        assert stats["bytes_sent_between_nodes"] == sent["across"] > 0
        assert stats["bytes_sent"] == stats["bytes_received"] == sent["across"] + sent["node"]
    numel = sum(torch.Size(shape).numel() for shape in SHAPES.values())
    # Two ranks to a node: half of the elements there, half of the mean back; padding and health.
    assert 3 * 4 * numel <= sent["node"] < 3 * 4 * numel * 1.02
    flat = nodes_of(4, None)
    flat.average(3)
    assert sent["across"] < flat.exchanges[0].stats()["bytes_sent"]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"ranks_per_node": 3}, "4 ranks cannot be divided into nodes of 3"),
        ({"ranks_per_node": 8}, "4 ranks cannot be divided into nodes of 8"),
        ({}, "LOCAL_WORLD_SIZE is not set .* pass ranks_per_node"),
        ({"ranks_per_node": 0}, "ranks_per_node must be"),
        ({"ranks_per_node": 2, "collective": "auto"}, "goes with collective='hierarchical'"),
    ],
)
def test_what_cannot_be_divided_is_refused(options: dict[str, Any], message: str) -> None:
    world = Simulated(4)
    with pytest.raises(ValueError, match=message):
        world.run(
            [
                Exchange(Sign(), **{"collective": "hierarchical", **options}, transport=t).round(
                    {"w": torch.ones(64, 64)}
                )
                for t in world
            ]
        )


def test_ranks_that_count_differently_are_named() -> None:
    world = Simulated(4)
    counts = [2, 2, 1, 2]
    exchanges = [
        Exchange(Sign(), collective="hierarchical", ranks_per_node=n, transport=t)
        for n, t in zip(counts, world, strict=True)
    ]
    with pytest.raises(
        ConfigMismatchError, match="ranks_per_node is 2 on ranks 0, 1, 3, 1 on rank 2"
    ):
        world.run([e.round({"w": torch.ones(64, 64)}) for e in exchanges])


def test_a_state_of_other_nodes_is_refused() -> None:
    world = nodes_of(2, 2)
    world.average(2)
    state = world.exchanges[0].state_dict()
    for other in (nodes_of(1, 4), nodes_of(4, None)):
        with pytest.raises(ValueError, match="saved with ranks_per_node 2, but this is"):
            other.exchanges[0].load_state_dict(state)
    states = [exchange.state_dict() for exchange in world.exchanges]
    states[3] = seal_own({**states[3], "ranks_per_node": 4})
    with pytest.raises(ValueError, match="different ranks_per_node"):
        world.exchanges[0].load_state_dicts(states)


def test_auto_never_means_it() -> None:
    for exchange, hierarchies in (
        (Exchange(Sign(), transport=Simulated(4)[0]), 0),
        (nodes_of(2, 2).exchanges[0], 1),
    ):
        bucket = exchange.buckets.of_segments([Segment("w", (64, 64), False)], torch.device("cpu"))
        route: Any = exchange._route(bucket, True, None)
        assert isinstance(route, Hierarchical) == hierarchies
        assert not isinstance(getattr(route, "_between", None), Hierarchical)


# On real ranks.


def launched(local_ranks: str | None) -> Any:
    environment = {k: v for k, v in os.environ.items() if k != "LOCAL_WORLD_SIZE"}
    if local_ranks is not None:
        environment["LOCAL_WORLD_SIZE"] = local_ranks
    return mock.patch.dict(os.environ, environment, clear=True)


def known_nodes(local_ranks: str | None) -> list[int | None]:
    groups = [None, *(dist.new_group(ranks) for ranks in ([0, 2], [0, 1, 2], [1, 2]))]
    rank = dist.get_rank()
    with launched(local_ranks):
        return [
            TorchDistributed(group).ranks_per_node
            for group in groups
            if group is None or rank in dist.get_process_group_ranks(group)
        ]


def test_nodes_are_those_of_torchrun(ranks_of: RanksOf) -> None:
    # All ranks; one of each node; two and one: not equally many; the last of one, the first of two.
    assert ranks_of(4).run(known_nodes, "2")[0] == [2, 1, None]
    assert ranks_of(4).run(known_nodes, "2")[2] == [2, 1, None, 1]
    assert ranks_of(4).run(known_nodes, "4")[2] == [4, 2, 3, 2]
    assert ranks_of(4).run(known_nodes, None)[2] == [None] * 4


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.layers = nn.Sequential(
            nn.Linear(24, 48), nn.Tanh(), nn.Linear(48, 48), nn.Tanh(), nn.Linear(48, 24)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers(x)  # type: ignore[no-any-return]


def train(compressor: Compressor) -> tuple[list[torch.Tensor], list[Tensors], dict[str, float]]:
    """Train behind the hook; return the averaged and the true local gradients of each step."""
    model, twin = Net(), Net()
    ddp = DistributedDataParallel(model, bucket_cap_mb=0.004)
    with launched("2"):
        # A bucket is what DDP makes of it.
        settings: Any = {"min_numel": 64, "granularity": "parameter"}
        state = register(ddp, compressor, collective="hierarchical", **settings)
    generator = torch.Generator().manual_seed(dist.get_rank())
    averaged, local = [], []
    for _ in range(4):
        batch = torch.randn(8, 24, generator=generator)
        twin.load_state_dict(model.state_dict())
        for net in (ddp, twin):
            net.zero_grad()
            net(batch).square().mean().backward()
        local.append({n: p.grad.clone() for n, p in twin.named_parameters() if p.grad is not None})
        averaged.append({n: p.grad.clone() for n, p in model.named_parameters()})  # type: ignore
        with torch.no_grad():
            for parameter in model.parameters():
                parameter -= 0.1 * parameter.grad  # type: ignore[operator]
    assert len(state.exchange.buckets) >= 2, "this test needs several buckets"
    return averaged, local, state.stats()  # type: ignore[return-value]


def test_behind_ddp_four_ranks_get_what_a_simulated_world_gets(ranks_of: RanksOf) -> None:
    compressor = TopK(density=0.1)
    reports = ranks_of(4).run(train, compressor)
    world = Simulated(4)
    exchanges = [
        Exchange(
            compressor,
            ErrorFeedback(),
            "hierarchical",
            min_numel=64,
            granularity="parameter",
            ranks_per_node=2,
            transport=transport,
        )
        for transport in world
    ]
    for step in range(4):
        gradients: list[Any] = [report[1][step] for report in reports]
        world.run([e.round(g) for e, g in zip(exchanges, gradients, strict=True)])
        for report in reports:
            for name, mean in gradients[0].items():
                actual: Any = report[0][step]
                torch.testing.assert_close(actual[name], mean, rtol=0, atol=1e-6)
                assert torch.equal(actual[name], reports[0][0][step][name])
    for report in reports:
        assert report[2]["bytes_sent_between_nodes"] < report[2]["bytes_sent"] / 3


def refused() -> str:
    with launched(None):
        state = CompressionState(Sign(), collective="hierarchical")
        ddp = DistributedDataParallel(Net())
        try:
            state.exchange.transport.run(state.exchange.agree())
        except ValueError as error:
            return str(error)
    return f"not refused: {ddp}"


def test_unknown_nodes_are_refused_before_a_gradient_is_exchanged(ranks_of: RanksOf) -> None:
    assert all("LOCAL_WORLD_SIZE is not set" in said for said in ranks_of(2).run(refused))
