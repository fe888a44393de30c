"""Copies of a hooked model, as exponential averages of its weights make them."""

import copy
import io
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from comm_hooks import (
    CompressionState,
    Differences,
    ErrorFeedback,
    Exchange,
    MomentumCorrection,
    TopK,
    compression_hook,
    register,
)
from comm_hooks.collectives import Simulated
from comm_hooks.memory.base import Memory
from tests.ranks import RanksOf
from tests.test_hook import SMALL_BUCKETS_MB, Net, batch

Weights = dict[str, torch.Tensor]


def hooked() -> tuple[DistributedDataParallel, CompressionState]:
    torch.manual_seed(0)
    ddp = DistributedDataParallel(Net(), bucket_cap_mb=SMALL_BUCKETS_MB)
    return ddp, register(ddp, "topk", density=0.1, min_numel=64)


def train(ddp: DistributedDataParallel, steps: range) -> None:
    for step in steps:
        inputs, targets = batch(step, dist.get_rank())
        ddp.zero_grad()
        nn.functional.cross_entropy(ddp(inputs), targets).backward()
        with torch.no_grad():
            for parameter in ddp.parameters():
                assert parameter.grad is not None
                parameter -= 0.05 * parameter.grad


def weights(ddp: nn.Module) -> Weights:
    return {name: p.detach().clone() for name, p in ddp.named_parameters()}


def same(first: Weights, second: Weights) -> bool:
    return first.keys() == second.keys() and all(
        torch.equal(v, second[n]) for n, v in first.items()
    )


def copied() -> dict[str, Any]:
    ddp, state = hooked()
    train(ddp, range(3))
    twin = copy.deepcopy(ddp)
    (_, twin_state), *_ = twin._comm_hooks
    inputs, _ = batch(0, 0)
    with torch.no_grad():
        evaluates = torch.equal(twin.eval()(inputs), copy.deepcopy(ddp.module).eval()(inputs))
    before, residuals = weights(twin), twin_state.state_dict()
    train(ddp, range(3, 6))
    alone, alone_state = hooked()
    train(alone, range(6))
    return {
        "evaluates": evaluates,
        "apart": same(before, weights(twin)) and not same(before, weights(ddp)),
        "trains on": same(weights(ddp), weights(alone)),
        "counts on": state.stats() == alone_state.stats(),
        "steps": (twin_state.stats()["steps"], state.stats()["steps"]),
        "residuals stay": same(residuals["memory"], twin_state.state_dict()["memory"])
        and not same(residuals["memory"], state.state_dict()["memory"]),
    }


def test_a_copy_of_a_hooked_model_is_apart_from_it(ranks_of: RanksOf) -> None:
    for report in ranks_of(2).run(copied):
        assert report.pop("steps") == (3, 6)
        assert all(report.values()), report


def names_follow() -> list[str]:
    """The copy's hook knows the copied parameters by name, should DDP be given it again."""
    ddp, _ = hooked()
    train(ddp, range(2))
    module, state = copy.deepcopy((ddp.module, ddp._comm_hooks[0][1]))
    again = DistributedDataParallel(module)
    again.register_comm_hook(state, compression_hook)
    train(again, range(2, 4))
    train(ddp, range(2, 4))
    assert same(weights(again), weights(ddp))
    return sorted(state.state_dict()["memory"])


def test_names_follow_the_copied_parameters(ranks_of: RanksOf) -> None:
    for names in ranks_of(2).run(names_follow):
        assert names == ["a.weight", "b.weight", "c.weight", "head.weight", "unused.weight"]


def test_a_copy_asks_the_same_scaler() -> None:
    scaler = torch.amp.GradScaler("cpu", init_scale=16.0)
    scaler.scale(torch.ones(1))  # which makes its tensor
    state = copy.deepcopy(CompressionState(TopK(density=0.1), loss_scale=scaler.get_scale))
    scaler.update(2.0)
    assert state.loss_scale is not None
    assert state.loss_scale() == scaler.get_scale()


@pytest.mark.parametrize(
    ("memory", "collective"),
    [
        (ErrorFeedback(bits=4), "sharded"),
        (MomentumCorrection(), "all_gather"),
        (Differences(), "sharded"),
    ],
    ids=str,
)
def test_a_copied_exchange_goes_on_like_the_original(memory: Memory, collective: Any) -> None:
    world = Simulated(2)
    originals = [
        Exchange(TopK(density=0.1), memory.fresh(), collective, transport=t, min_numel=16)
        for t in world
    ]

    def average(exchanges: list[Exchange], step: int) -> list[torch.Tensor]:
        generator = torch.Generator().manual_seed(step)
        tensors = [{"w": torch.randn(32, 32, generator=generator)} for _ in world]
        world.run([e.round(t) for e, t in zip(exchanges, tensors, strict=True)])
        return [tensor["w"] for tensor in tensors]

    for step in range(3):
        average(originals, step)
    copies = copy.deepcopy(originals)
    firsts = [average(copies, step) for step in range(3, 6)]
    seconds = [average(originals, step) for step in range(3, 6)]
    for first, second in zip(firsts, seconds, strict=True):
        assert all(map(torch.equal, first, second))
    assert [e.stats() for e in copies] == [e.stats() for e in originals]


def test_a_state_of_a_hook_says_how_it_is_saved() -> None:
    state = CompressionState(TopK(density=0.1))
    with pytest.raises(TypeError, match=r"save state_dict\(\), on every rank"):
        torch.save(state, io.BytesIO())
