"""Fabric: register() takes what setup() returns, also compiled, and knows the loss scale."""

import os
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from comm_hooks import register
from tests.ranks import Ranks
from tests.test_hook import Net, batch

fabric_module = pytest.importorskip("lightning.fabric", reason="Lightning is not installed")

RanksOf = Callable[[int], Ranks]


def train(compiled: bool, scaled: bool) -> dict[str, Any]:
    """Train with Fabric and with DDP alone, both through top-k; accumulate two batches."""
    from lightning.fabric.plugins import MixedPrecision
    from lightning.fabric.plugins.environments import TorchElasticEnvironment
    from lightning.fabric.strategies import DDPStrategy

    rank = dist.get_rank()
    os.environ.update(
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT="1",  # not used: the process group is there
        RANK=str(rank),
        LOCAL_RANK=str(rank),
        WORLD_SIZE=str(dist.get_world_size()),
        LOCAL_WORLD_SIZE=str(dist.get_world_size()),
        TORCHELASTIC_RUN_ID="none",
    )
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**14) if scaled else None
    fabric = fabric_module.Fabric(
        accelerator="cpu",
        devices=dist.get_world_size(),
        strategy=DDPStrategy(cluster_environment=TorchElasticEnvironment(), bucket_cap_mb=25),
        plugins=[MixedPrecision("16-mixed", "cpu", scaler)] if scaled else None,
    )
    torch.manual_seed(0)
    net = Net()
    fabric.launch()
    model: Any = torch.compile(net, backend="aot_eager") if compiled else net
    model, optimizer = fabric.setup(model, torch.optim.SGD(net.parameters(), lr=0.05))
    state = register(model, "topk", density=0.1, min_numel=64)

    torch.manual_seed(0)
    twin = Net()
    ddp = DistributedDataParallel(twin, bucket_cap_mb=25)
    register(ddp, "topk", density=0.1, min_numel=64)
    for step in range(4):
        optimizer.zero_grad()
        twin.zero_grad()
        for micro in range(2):
            inputs, targets = batch(10 * step + micro, rank)
            with fabric.no_backward_sync(model, enabled=micro == 0):
                fabric.backward(nn.functional.cross_entropy(model(inputs), targets))
            ddp.require_backward_grad_sync = micro == 1
            nn.functional.cross_entropy(ddp(inputs), targets).backward()
        optimizer.step()
        with torch.no_grad():
            for parameter in twin.parameters():
                parameter -= 0.05 * parameter.grad
    theirs = dict(twin.named_parameters())
    return {
        "error": max(float((p - theirs[n]).abs().max()) for n, p in net.named_parameters()),
        "names": sorted(state.state_dict()["memory"]),
        "scale": state.loss_scale == (scaler.get_scale if scaler else None),
        "stats": state.stats(),
    }


@pytest.mark.parametrize(
    "compiled",
    [
        pytest.param(False, id="plain"),
        pytest.param(True, id="torch.compile", marks=pytest.mark.slow),
    ],
)
def test_fabric_does_what_ddp_does(ranks_of: RanksOf, compiled: bool) -> None:
    for report in ranks_of(2).run(train, compiled, False):
        assert report["error"] < 1e-6
        assert report["names"] == [
            "a.weight",
            "b.weight",
            "c.weight",
            "head.weight",
            "unused.weight",
        ]
        assert report["scale"]
        assert report["stats"]["steps"] == 4


def test_fabrics_loss_scale_is_found(ranks_of: RanksOf) -> None:
    for report in ranks_of(2).run(train, False, True):
        assert report["scale"]
        assert 0 < report["stats"]["residual_norm"] < 50  # scaled it would be 16384 times as large
