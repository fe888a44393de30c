"""Optimizers that exchange, in distributed checkpoints: of replicas and of shards."""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    get_model_state_dict,
    get_state_dict,
    set_model_state_dict,
    set_state_dict,
)
from torch.nn.parallel import DistributedDataParallel

from comm_hooks import ErrorFeedback, Exchange, Sign, register
from comm_hooks.checkpoints.distributed_checkpoint import RankStates
from comm_hooks.optim import LocalVarianceAdam, OneBitAdam, low_communication
from tests.frameworks.hsdp import batch, build, two_by_two
from tests.frameworks.selection import by_default
from tests.ranks import RanksOf

STOP, STEPS = 3, 6


def optimizer_of(kind: str, model: nn.Module, group: Any) -> Any:
    named = model.named_parameters()
    if kind == "rounds":
        return low_communication(named, lr=0.02, bits_per_parameter=3.0, process_group=group)
    exchange = Exchange(Sign(), ErrorFeedback(), process_group=group, min_numel=16)
    if kind == "signs":
        return LocalVarianceAdam(named, exchange, lr=0.02)
    return OneBitAdam(named, exchange, lr=0.02, freeze_step=2)


def started(kind: str, sharded: bool) -> tuple[nn.Module, Any, Any]:
    """Return the model, its optimizer, and what ranks save of it."""
    if sharded:
        mesh = two_by_two()
        model = build(mesh["shard"])
        optimizer = optimizer_of(kind, model, mesh["replicate"].get_group())
        return model, optimizer, register(model, optimizer)
    torch.manual_seed(0)
    model = DistributedDataParallel(nn.Sequential(nn.Linear(16, 64), nn.Tanh(), nn.Linear(64, 8)))
    optimizer = optimizer_of(kind, model.module, None)
    return model, optimizer, register(model, optimizer)


def train(model: nn.Module, optimizer: Any, steps: range, sharded: bool) -> None:
    for step in steps:
        generator = torch.Generator().manual_seed(100 * step + dist.get_rank())
        inputs = (
            batch(dist.get_rank(), step) if sharded else torch.randn(8, 16, generator=generator)
        )
        model(inputs).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def save_and_resume(kind: str, folder: str, sharded: bool) -> tuple[bool, bool]:
    """Return whether a run that resumes ends as one that goes on, and whether it has learned."""
    model, optimizer, state = started(kind, sharded)
    train(model, optimizer, range(STOP), sharded)
    content: dict[str, Any] = {"ranks": RankStates(state)}
    if kind != "rounds" and sharded:
        content["model"] = get_model_state_dict(model)
    elif kind != "rounds":
        content["model"], content["optimizer"] = get_state_dict(model, optimizer)
    dcp.save(content, checkpoint_id=folder)
    middle = [p.detach().clone() for p in model.parameters()]
    train(model, optimizer, range(STOP, STEPS), sharded)

    other, again, ranks = started(kind, sharded)
    if kind != "rounds" and sharded:
        saved = {"model": get_model_state_dict(other)}
        dcp.load(saved, checkpoint_id=folder)
        set_model_state_dict(other, saved["model"])
    elif kind != "rounds":
        saved = dict(zip(("model", "optimizer"), get_state_dict(other, again), strict=True))
        dcp.load(saved, checkpoint_id=folder)
        set_state_dict(
            other, again, model_state_dict=saved["model"], optim_state_dict=saved["optimizer"]
        )
    RankStates(ranks).load("ranks", folder)
    train(other, again, range(STOP, STEPS), sharded)
    pairs = zip(model.parameters(), other.parameters(), strict=True)
    same = all(torch.equal(local(a), local(b)) for a, b in pairs)
    moved = any(
        not torch.equal(local(a), local(b)) for a, b in zip(model.parameters(), middle, strict=True)
    )
    return same, moved


def local(tensor: Any) -> torch.Tensor:
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


@pytest.mark.parametrize(
    ("kind", "sharded"),
    by_default(
        [("rounds", False), ("one_bit_adam", False), ("signs", True)],
        [("signs", False), ("rounds", True), ("one_bit_adam", True)],
    ),
)
def test_a_run_goes_on_bit_for_bit(
    ranks_of: RanksOf, tmp_path: Path, kind: str, sharded: bool
) -> None:
    outcomes = ranks_of(4 if sharded else 2).run(save_and_resume, kind, str(tmp_path), sharded)
    assert outcomes == [(True, True)] * len(outcomes)
