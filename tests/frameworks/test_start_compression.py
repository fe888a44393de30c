"""The first steps of a hook can be exact: gradients are averaged as plain DDP does, and counted."""

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from comm_hooks import register
from comm_hooks.errors import ConfigMismatchError
from tests.ranks import RanksOf
from tests.test_hook import Net, backward, gradients

START, STEPS = 3, 6


def differences(resume_at: int) -> tuple[list[float], dict[str, float], bool]:
    """Return how far each step's gradients are from those of plain DDP."""
    torch.manual_seed(0)
    net, twin = Net(), Net()
    twin.load_state_dict(net.state_dict())
    plain = DistributedDataParallel(twin)
    ddp = DistributedDataParallel(net, bucket_cap_mb=0.01)
    state = register(ddp, "topk", density=0.05, min_numel=64, start_compression_step=START)
    gaps, empty = [], True
    for step in range(STEPS):
        if step == resume_at:
            weights, saved = net.state_dict(), state.state_dict()
            net = Net()
            net.load_state_dict(weights)
            ddp = DistributedDataParallel(net, bucket_cap_mb=0.01)
            state = register(ddp, "topk", density=0.05, min_numel=64, start_compression_step=START)
            state.load_state_dict(saved)
        for model in (ddp, plain):
            model.zero_grad()
            backward(model, step, dist.get_rank())
        own, expected = gradients(net), gradients(twin)
        gaps.append(max(float((own[n] - expected[n]).abs().max()) for n in own))
        if step == START - 1:
            empty = state.stats()["residual_norm"] == 0
    return gaps, state.stats(), empty


@pytest.mark.parametrize("resume_at", [2, 4])
def test_first_exact_then_compressed(ranks_of: RanksOf, resume_at: int) -> None:
    for gaps, stats, empty in ranks_of(2).run(differences, resume_at):
        assert max(gaps[:START]) < 1e-6
        assert min(gaps[START:]) > 1e-3
        assert empty
        assert stats["steps"] == STEPS


def mismatched() -> str:
    ddp = DistributedDataParallel(nn.Linear(64, 64))
    with pytest.raises(ConfigMismatchError, match="start_compression_step"):
        register(ddp, "topk", start_compression_step=dist.get_rank())
    return "refused"


def test_ranks_must_start_together(ranks_of: RanksOf) -> None:
    assert ranks_of(2).run(mismatched) == ["refused", "refused"]
