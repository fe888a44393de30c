"""The composable replicate(): DDP without a wrapper, which makes its DDP in the first forward."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed._composable.replicate import replicate
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.parallel import DistributedDataParallel
from torch.nn.parallel.distributed import _MixedPrecision

from comm_hooks import Identity, register
from tests.ranks import Ranks
from tests.test_hook import Net, backward, gradients

RanksOf = Callable[[int], Ranks]


def replicated(initialized: bool) -> dict[str, Any]:
    """Train with the composable replicate() and, beside it, with DDP; both through top-k."""
    rank = dist.get_rank()
    torch.manual_seed(0)
    model = Net()
    twin = copy.deepcopy(model)
    replicate(model, bucket_cap_mb=25)
    ddp = DistributedDataParallel(twin, bucket_cap_mb=25)
    if initialized:  # its DDP is made in the first forward pass
        with torch.no_grad():
            model(torch.ones(1, 40))
    settings: dict[str, Any] = {"density": 0.1, "min_numel": 64}
    state = register(nn.Sequential(model), "topk", **settings)
    register(ddp, "topk", **settings)
    try:
        register(model, "topk")
        refused = ""
    except ValueError as error:
        refused = str(error)
    for step in range(3):
        for net in (model, ddp):
            net.zero_grad()
            backward(net, step, rank)
    ours, theirs = gradients(model), gradients(twin)
    return {
        "error": max(float((ours[n] - theirs[n]).abs().max()) for n in ours),
        "names": sorted(state.state_dict()["memory"]),
        "sent": state.stats()["bytes_sent"],
        "refused": refused,
    }


@pytest.mark.parametrize("initialized", [False, True], ids=["at once", "after a forward pass"])
def test_composable_replicate_does_what_ddp_does(ranks_of: RanksOf, initialized: bool) -> None:
    for report in ranks_of(2).run(replicated, initialized):
        assert report["error"] < 1e-6
        assert report["names"] == [
            "a.weight",
            "b.weight",
            "c.weight",
            "head.weight",
            "unused.weight",
        ]
        assert report["sent"] > 0
        assert "a communication hook already, compression_hook" in report["refused"]


def replicated_over(subgroup: bool) -> bool:
    """Average over pairs of 4 ranks, named by a group or by a mesh."""
    rank = dist.get_rank()
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("far", "near"))["near"]
    options: dict[str, Any] = (
        {"process_group": mesh.get_group()} if subgroup else {"device_mesh": mesh}
    )
    model = Net()
    twin = copy.deepcopy(model)
    replicate(model, **options)
    register(model, Identity(), min_numel=64)
    backward(model, 0, rank)
    backward(twin, 0, rank)
    ours, mean = gradients(model), gradients(twin)
    for gradient in mean.values():
        dist.all_reduce(gradient, group=mesh.get_group())
    return all(torch.allclose(ours[name], mean[name] / 2, atol=1e-6) for name in ours)


@pytest.mark.parametrize("subgroup", [True, False], ids=["process_group", "device_mesh"])
def test_replicate_averages_over_its_group(ranks_of: RanksOf, subgroup: bool) -> None:
    assert all(ranks_of(4).run(replicated_over, subgroup))


def mixed_precision_replica() -> str:
    model = replicate(Net(), mixed_precision=_MixedPrecision(param_dtype=torch.bfloat16))
    try:
        register(model, "topk")
    except ValueError as error:
        return str(error)
    return ""


def test_replicate_with_mixed_precision_is_refused(ranks_of: RanksOf) -> None:
    for message in ranks_of(2).run(mixed_precision_replica):
        assert "takes the only communication hook for itself" in message
