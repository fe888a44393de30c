"""Optimizers that own the exchange, on a GPU, over NCCL."""

from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from comm_hooks import register
from comm_hooks.optim import low_communication
from tests.gpu.training import backward, fresh, train_on_both, weights
from tests.optim.test_contract import MAKE
from tests.ranks import RanksOf

# What a GPU rounds otherwise, these make another step of: the sign of almost nothing, a place among
# the largest.
CHAOTIC = {"lva", "micro_4", "demo", "zero_one"}


def owning(kind: str, model: DistributedDataParallel) -> Optimizer:
    optimizer = MAKE[kind](list(model.named_parameters()))
    register(model, optimizer)
    return optimizer


@pytest.mark.parametrize("world_size", [2, 4])
@pytest.mark.parametrize("kind", MAKE)
def test_a_gpu_trains_like_a_cpu(nccl_ranks: RanksOf, kind: str, world_size: int) -> None:
    outcomes = nccl_ranks(world_size).run(train_on_both, partial(owning, kind))
    first = outcomes[0]
    assert all(torch.equal(first["cuda"], other["cuda"]) for other in outcomes[1:])
    moved = first["cpu"] - first["start"]
    apart = (first["cuda"] - first["cpu"]).norm() / moved.norm()
    assert apart < (0.9 if kind in CHAOTIC else 0.05)


def server_model(device: str, options: dict[str, Any]) -> Tensor:
    model = fresh(device)
    optimizer = low_communication(model.named_parameters(), lr=1e-3, **options)
    register(model, optimizer)
    for step in range(12):
        optimizer.zero_grad()
        backward(model, step, device)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
    optimizer.synchronize()
    with optimizer.server_parameters():
        server = weights(model)
    assert not torch.equal(server, weights(fresh(device)))
    return server


@pytest.mark.parametrize("world_size", [2, 4])
@pytest.mark.parametrize(
    "options",
    [
        {"bits_per_parameter": 0.5},
        {"bits_per_parameter": 2.0},
        {"bits_per_parameter": 0.5, "inner": "muon"},
    ],
    ids=str,
)
def test_rounds_end_in_one_model(
    nccl_ranks: RanksOf, options: dict[str, Any], world_size: int
) -> None:
    first, *others = nccl_ranks(world_size).run(server_model, "cuda", options)
    assert all(torch.equal(first, other) for other in others)
