"""Residuals in checkpoints of ``torch.distributed.checkpoint``: every rank gets its own back."""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from comm_hooks import CompressionState, ErrorFeedback, Exchange, TopK, register
from comm_hooks.checkpoints.distributed_checkpoint import RankStates
from comm_hooks.collectives import Simulated
from tests.ranks import RanksOf


def start() -> tuple[nn.Module, DistributedDataParallel, CompressionState]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 32), nn.Linear(32, 4))
    ddp = DistributedDataParallel(model)
    return model, ddp, register(ddp, "topk", density=0.1, min_numel=16)


def train(model: nn.Module, ddp: nn.Module, steps: range) -> None:
    for step in steps:
        generator = torch.Generator().manual_seed(100 * step + dist.get_rank())
        ddp.zero_grad()
        ddp(torch.randn(8, 16, generator=generator)).square().sum().backward()
        with torch.no_grad():
            for parameter in model.parameters():
                assert parameter.grad is not None
                parameter -= 0.01 * parameter.grad


def save_and_resume(folder: str, with_async: bool) -> tuple[bool, dict[str, torch.Tensor]]:
    """Return whether a run that resumes ends bit for bit as one that goes on, and the residuals."""
    model, ddp, state = start()
    train(model, ddp, range(3))
    content: dict[str, Any] = {"model": model.state_dict(), "hook": RankStates(state)}
    if with_async:
        dcp.async_save(content, checkpoint_id=folder).result()  # type: ignore[union-attr]
    else:
        dcp.save(content, checkpoint_id=folder)
    kept = state.state_dict()["memory"]
    train(model, ddp, range(3, 6))
    other_model, other_ddp, other_state = start()
    saved = {"model": other_model.state_dict()}
    dcp.load(saved, checkpoint_id=folder)
    other_model.load_state_dict(saved["model"])
    RankStates(other_state).load("hook", folder)
    train(other_model, other_ddp, range(3, 6))
    ends = zip(model.parameters(), other_model.parameters(), strict=True)
    return all(torch.equal(a, b) for a, b in ends), kept


def resume(folder: str, name: str) -> dict[str, torch.Tensor]:
    _, _, state = start()
    RankStates(state).load(name, folder)
    return state.state_dict()["memory"]


@pytest.mark.parametrize("with_async", [False, True], ids=["save", "async_save"])
def test_a_run_goes_on_bit_for_bit(ranks_of: RanksOf, tmp_path: Path, with_async: bool) -> None:
    outcomes = ranks_of(2).run(save_and_resume, str(tmp_path), with_async)
    assert all(same for same, _ in outcomes)
    (_, first), (_, second) = outcomes
    assert not torch.equal(first["0.weight"], second["0.weight"]), "each rank has its own"

    # On another number of ranks the mean of what was not sent is kept.
    loaded = ranks_of(3).run(resume, str(tmp_path), "hook")
    for name in first:
        mean = sum(memory[name] for memory in loaded) / 3
        torch.testing.assert_close(mean, (first[name] + second[name]) / 2)


def test_what_is_not_there_or_damaged_is_refused_on_all_ranks(
    ranks_of: RanksOf, tmp_path: Path
) -> None:
    (_, _), (_, kept) = ranks_of(2).run(save_and_resume, str(tmp_path), False)
    for outcome in ranks_of(2).outcomes(resume, str(tmp_path), "another"):
        assert "has no states of ranks under 'another'" in str(outcome.error)
    residual = kept["0.weight"].numpy().tobytes()
    damaged = 0
    for file in tmp_path.glob("*.distcp"):
        octets = bytearray(file.read_bytes())
        if (place := octets.find(residual)) >= 0:
            octets[place + 2] ^= 1
            file.write_bytes(octets)
            damaged += 1
    assert damaged == 1
    for outcome in ranks_of(2).outcomes(resume, str(tmp_path), "hook"):
        assert "hook.rank1 cannot be read (the state is damaged" in str(outcome.error)


def test_dcp_load_says_what_to_call() -> None:
    with pytest.raises(ValueError, match=r"call RankStates\(state\)\.load\(name, checkpoint\)"):
        RankStates.load_state_dict(None, {})  # type: ignore[arg-type]


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_ranks_without_torch_distributed_are_told_of_files(tmp_path: Path) -> None:
    """Each would be the only writer, and write over what the others have written."""
    exchange = Exchange(TopK(density=0.1), ErrorFeedback(), transport=Simulated(2)[0])
    with pytest.raises(ValueError, match="for 1 of the 2 ranks that exchange, since"):
        dcp.save({"ranks": RankStates(exchange)}, checkpoint_id=tmp_path, no_dist=True)
