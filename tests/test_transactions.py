"""A step with several buckets changes all residuals, or none."""

import copy
from collections.abc import Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from comm_hooks import (
    Compressor,
    Differences,
    ErrorFeedback,
    Exchange,
    MomentumCorrection,
    register,
)
from comm_hooks.collectives import Simulated
from comm_hooks.compressors import Identity, Sign, TopK
from tests.optim.scenarios import rarely
from tests.ranks import RanksOf
from tests.test_exchange import SHAPES, WITH_FEEDBACK, World
from tests.worlds import MakeMemory

BUCKETS = (("a", "b"), ("c", "d"), ("e", "f"))
ROUTES = ("all_gather", "sharded", "hierarchical")
MEMORIES: list[tuple[Compressor, MakeMemory]] = [
    *[(each, ErrorFeedback) for each in WITH_FEEDBACK if each != Identity()],
    (TopK(density=0.1), lambda: ErrorFeedback(bits=16, decay=0.9)),
    (TopK(density=0.1), lambda: ErrorFeedback(bits=4)),
    (TopK(density=0.1), MomentumCorrection),
    (TopK(density=0.1), Differences),
    (Sign(), Differences),
]
Gradients = dict[str, torch.Tensor]


def step(world: World, gradients: Sequence[Gradients]) -> None:
    """Take a step of three buckets."""
    for names in BUCKETS:
        rounds = []
        for exchange, own in zip(world.exchanges, gradients, strict=True):
            tensors = {name: own[name] for name in names}
            bucket = exchange.buckets.of(tensors)
            rounds.append(exchange.bucket_round(bucket, [*tensors.values()], partial=True))
        world.simulated.run(rounds)
    for exchange in world.exchanges:
        exchange.end_step()


def states(world: World) -> list[dict[str, torch.Tensor]]:
    """Return all rows of all memories of each rank."""
    found = []
    for exchange in world.exchanges:
        state = exchange.state_dict()
        rows = {f"own {name}": row for name, row in state["memory"].items()}
        found.append(rows | {f"server {n}": row for n, row in state["server_memory"].items()})
    return found


@pytest.mark.parametrize("collective", ROUTES)
@pytest.mark.parametrize(("compressor", "memory"), MEMORIES, ids=repr)
@pytest.mark.parametrize("bucket", [1, *rarely(0, 2)])
def test_a_bucket_that_is_not_finite_leaves_all_residuals_of_the_step(
    compressor: Compressor, memory: MakeMemory, collective: str, bucket: int
) -> None:
    options = {"ranks_per_node": 2} if collective == "hierarchical" else {}
    world = World(4, compressor, memory=memory, collective=collective, min_numel=8, **options)
    step(world, world.gradients("abcdef"))
    before = states(world)
    bad = world.gradients("abcdef")
    name = BUCKETS[bucket][0]
    bad[2][name].view(-1)[3] = float("inf")
    step(world, bad)
    after = states(world)
    for old, new in zip(before, after, strict=True):
        assert old.keys() == new.keys()
        assert all(torch.equal(row, new[key]) for key, row in old.items())
    for own in bad:
        assert own[name].isnan().all()
    step(world, world.gradients("abcdef"))
    changed = [not torch.equal(row, states(world)[0][key]) for key, row in before[0].items()]
    assert any(changed)


@pytest.mark.parametrize("collective", ["all_gather", "sharded", *rarely("hierarchical")])
@pytest.mark.parametrize(("compressor", "memory"), MEMORIES, ids=repr)
def test_buckets_of_a_step_end_like_steps_of_their_own(
    compressor: Compressor, memory: MakeMemory, collective: str
) -> None:
    """Residuals and means are the same bits whether they wait for the end of the step or not."""
    options = {"ranks_per_node": 2} if collective == "hierarchical" else {}
    worlds = [
        World(4, compressor, memory=memory, collective=collective, min_numel=8, **options)
        for _ in range(2)
    ]
    for _ in range(3):
        gradients = worlds[0].gradients("abcdef")
        others = copy.deepcopy(gradients)
        step(worlds[0], gradients)
        for names in BUCKETS:
            rounds = []
            for exchange, own in zip(worlds[1].exchanges, others, strict=True):
                tensors = {name: own[name] for name in names}
                bucket = exchange.buckets.of(tensors)
                rounds.append(exchange.bucket_round(bucket, [*tensors.values()]))
            worlds[1].simulated.run(rounds)
        for exchange in worlds[1].exchanges:
            exchange.end_step()
        for own, other in zip(gradients, others, strict=True):
            assert all(torch.equal(own[name], other[name]) for name in SHAPES)
    for own, other in zip(*map(states, worlds), strict=True):
        assert all(torch.equal(row, other[key]) for key, row in own.items())


def test_a_round_that_fails_is_no_part_of_the_next_step() -> None:
    world = Simulated(2)
    exchanges = [Exchange(TopK(density=0.5), transport=t, min_numel=1) for t in world]

    def rounds(value: float) -> list[object]:
        made = []
        for exchange in exchanges:
            tensors = {"w": torch.full((8, 8), value)}
            bucket = exchange.buckets.of(tensors)
            made.append(exchange.bucket_round(bucket, [*tensors.values()], partial=True))
        return made

    world.run(rounds(float("nan")))
    broken = rounds(1.0)
    next(broken[0])
    with pytest.raises(RuntimeError, match="link"):
        broken[0].throw(RuntimeError("the link is down"))
    exchanges[0].end_step()
    assert exchanges[0].state.memory is not None
    assert not exchanges[0].state.memory.norm()


STEPS, BAD = 6, (1, 4)
LAYERS = 5


def with_bad_layers(compressor: str, options: dict[str, Any]) -> dict[str, Any]:
    """Train a DDP model whose layers are a bucket each; some gradients of rank 1 are NaN."""
    rank = dist.get_rank()
    torch.manual_seed(0)
    model = nn.Sequential(*[nn.Linear(40, 40, bias=False) for _ in range(LAYERS)])
    ddp = DistributedDataParallel(model, bucket_cap_mb=1e-3)
    state = register(ddp, compressor, min_numel=64, **options)
    names = [name for name, _ in model.named_parameters()]
    now = 0

    given = {name: torch.zeros(40, 40, dtype=torch.float64) for name in names}
    received = copy.deepcopy(given)

    def watch(name: str, parameter: torch.Tensor) -> None:
        def note(gradient: torch.Tensor) -> torch.Tensor:
            if now not in BAD:
                given[name] += gradient.double()
            is_bad = now in BAD and rank == 1 and name == names[2]
            return gradient * torch.nan if is_bad else gradient

        parameter.register_hook(note)

    for name, parameter in model.named_parameters():
        watch(name, parameter)
    finite = []
    for now in range(STEPS):
        ddp.zero_grad()
        inputs = torch.randn(8, 40, generator=torch.Generator().manual_seed(10 * now + rank))
        ddp(inputs).square().mean().backward()
        gradients = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
        finite.append({bool(gradient.isfinite().all()) for gradient in gradients.values()})
        if now not in BAD:
            for name, gradient in gradients.items():
                received[name] += gradient.double()
    saved = state.state_dict()
    for name in names:
        dist.all_reduce(given[name])
    return {
        "given": {name: total / dist.get_world_size() for name, total in given.items()},
        "received": received,
        "memory": saved["memory"],
        "finite": finite,
        "buckets": len(state.exchange.buckets),
        "steps": state.stats()["steps"],
    }


@pytest.mark.parametrize(
    ("compressor", "options"),
    [
        ("topk", {"density": 0.1}),
        ("topk", {"density": 0.1, "granularity": "bucket"}),
        ("sign", {}),
        ("quantize", {"bits": 4}),
    ],
)
def test_nothing_is_lost_when_one_layer_of_one_rank_is_not_finite(
    ranks_of: RanksOf, compressor: str, options: dict[str, Any]
) -> None:
    """Of the steps that count, all that was given has arrived or waits, in every layer."""
    options = {**options, "collective": "all_gather"}
    outcomes = ranks_of(2).run(with_bad_layers, compressor, options)
    for outcome in outcomes:
        assert outcome["buckets"] > 2
        assert outcome["steps"] == STEPS
        expected = [{False} if step in BAD else {True} for step in range(STEPS)]
        assert outcome["finite"] == expected, "every layer, on every rank"
        for name, given in outcome["given"].items():
            waiting = sum(other["memory"][name].double() for other in outcomes) / len(outcomes)
            lost = given - outcome["received"][name] - waiting.view_as(given)
            assert lost.norm() < 1e-5 * given.norm(), name
