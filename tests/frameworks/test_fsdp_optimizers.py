"""Optimizers that exchange between nodes, of a model that is sharded inside each: 2 x 2 ranks."""

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from comm_hooks import ConfigMismatchError, ErrorFeedback, Exchange, Identity, Sign, register
from comm_hooks.checkpoints.rank_files import load_rank_files, save_rank_file
from comm_hooks.optim import (
    LocalRounds,
    LocalVarianceAdam,
    OneBitAdam,
    OneBitLamb,
    low_communication,
)
from comm_hooks.shards import local_shards
from tests.frameworks.hsdp import Net, batch, build, two_by_two
from tests.frameworks.selection import by_default
from tests.ranks import RanksOf

CLIP_NORM, STEPS, STOP = 0.5, 6, 3
Weights = dict[str, torch.Tensor]


def optimizer_of(method: str, model: nn.Module, group: Any) -> Any:
    named = model.named_parameters()
    if method == "low_communication":
        return low_communication(named, lr=0.02, bits_per_parameter=3.0, process_group=group)
    exchange = Exchange(Sign(), ErrorFeedback(), process_group=group, min_numel=64)
    if method == "signs":
        return LocalVarianceAdam(named, exchange, lr=0.02)
    plain = Exchange(Identity(), process_group=group)
    if method == "uncompressed":
        return OneBitAdam(named, plain, lr=0.02, freeze_step=100)  # Adam
    inner = torch.optim.AdamW(local_shards(named), lr=0.02)
    return LocalRounds(inner, plain, local_steps=2, look_ahead=0.0)


def weights(model: nn.Module) -> Weights:
    return {
        n: (p.full_tensor() if hasattr(p, "full_tensor") else p).detach().clone()
        for n, p in model.named_parameters()
    }


def gradients_of(model: nn.Module) -> list[Any]:
    return [p.grad for p in model.parameters() if p.grad is not None]


def train(
    method: str, mesh: Any, folder: str, steps: range, batches: Callable[[int], torch.Tensor]
) -> tuple[nn.Module, Any]:
    """Train a sharded model, or without a mesh a whole one over the ranks of the first column."""
    if mesh is None:
        torch.manual_seed(0)
        model: nn.Module = Net()
        group = dist.group.WORLD
    else:
        model = build(mesh["shard"])
        group = mesh["replicate"].get_group()
    optimizer = optimizer_of(method, model, group)
    state = register(model, optimizer)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))
    if steps.start:
        model.load_state_dict(torch.load(f"{folder}/model{dist.get_rank()}.pt"))
        load_rank_files(state, folder)
        scheduler.load_state_dict({**scheduler.state_dict(), "last_epoch": steps.start})
        for group, lr in zip(optimizer.param_groups, [0.02 / (1 + steps.start)], strict=True):
            group["lr"] = lr
    for step in steps:
        for micro in range(2):
            # Every rank has a batch of its own.
            (model(batches(2 * step + micro)).square().mean() / 2).backward()
        nn.utils.clip_grad_norm_(model.parameters(), CLIP_NORM)
        optimizer.step()
        optimizer.zero_grad()
        scheduler.step()
        assert not gradients_of(model)
    return model, state


def own_batch(index: int) -> torch.Tensor:
    return batch(dist.get_rank(), index)


def resumed(method: str, folder: str) -> list[Any]:
    """Return whole and resumed trainings, and what evaluation and state_dict() show."""
    mesh = two_by_two()
    whole, state = train(method, mesh, folder, range(STEPS), own_batch)
    before = weights(whole)
    saved = {n: v.full_tensor().clone() for n, v in whole.state_dict().items()}
    shown = weights(whole.eval())
    whole.train()
    after = weights(whole)
    model, half = train(method, mesh, folder, range(STOP), own_batch)
    save_rank_file(half, folder)
    torch.save(model.state_dict(), f"{folder}/model{dist.get_rank()}.pt")
    dist.barrier()
    again, stats = train(method, mesh, folder, range(STOP, STEPS), own_batch)
    return [before, after, shown, saved, weights(again), state.stats(), stats.stats()]


@pytest.mark.parametrize("method", by_default(["low_communication"], ["signs"]))
def test_a_sharded_model_resumes_bit_for_bit(
    ranks_of: RanksOf, tmp_path: Path, method: str
) -> None:
    outcomes = ranks_of(4).run(resumed, method, str(tmp_path))
    for before, after, shown, saved, again, stats, later in outcomes:
        for name, value in before.items():
            assert torch.equal(after[name], value)
            assert torch.equal(again[name], value)
            assert torch.equal(saved[name], shown[name])
            assert torch.equal(shown[name], outcomes[0][2][name]), "all share one model"
        assert stats["steps"] == later["steps"] == STEPS
        assert min(stats["bytes_sent"], later["bytes_sent"]) > 0
    differs = any(not torch.equal(outcomes[2][0][n], v) for n, v in outcomes[0][0].items())
    assert differs == (method == "low_communication")


def found_in(method: str, folder: str) -> list[str]:
    """Return what each rank is told where no, two, and one of the files are gone."""
    mesh = two_by_two()
    _, state = train(method, mesh, folder, range(STOP), own_batch)
    told = []
    for lost in ([], [1, 3], [3]):
        save_rank_file(state, folder)
        dist.barrier()
        if dist.get_rank() in lost:
            Path(folder, f"rank{dist.get_rank()}.pt").unlink()
        dist.barrier()
        try:
            told.append(str(load_rank_files(state, folder)))
        except ValueError as error:
            told.append(str(error))
        dist.barrier()
    return told


@pytest.mark.parametrize("method", by_default(["signs"], ["low_communication"]))
def test_a_model_is_restored_in_all_its_parts_or_not_at_all(
    ranks_of: RanksOf, tmp_path: Path, method: str
) -> None:
    """Ranks 0 and 2 hold one half, ranks 1 and 3 the other."""
    for whole, half, three_quarters in ranks_of(4).run(found_in, method, str(tmp_path)):
        assert whole == "True"
        assert "rank3.pt is missing" in three_quarters
        assert "of some parts of the sharded model" in half


def half_goes_by_another_rate(method: str) -> None:
    mesh = two_by_two()
    model = build(mesh["shard"])
    optimizer = optimizer_of(method, model, mesh["replicate"].get_group())
    for group in optimizer.param_groups:
        group["lr"] = 0.02 if mesh["shard"].get_local_rank() == 0 else 0.03
    register(model, optimizer)
    model(own_batch(0)).square().mean().backward()
    optimizer.step()


@pytest.mark.parametrize("method", by_default(["low_communication"], ["signs"]))
def test_holders_of_other_parts_go_by_the_same_settings(ranks_of: RanksOf, method: str) -> None:
    """Ranks that exchange agree with each other, and yet the halves would be trained apart."""
    for outcome in ranks_of(4).outcomes(half_goes_by_another_rate, method):
        assert isinstance(outcome.error, ConfigMismatchError)
        assert "lr is 0.02 on ranks 0, 2, 0.03 on ranks 1, 3" in str(outcome.error)


def under_a_scaler(method: str, overflows: bool) -> list[Any]:
    """Return the weights before, between and after two steps, and the scale at the end.

    Rank 3 has an element in the second step that overflows; nobody else holds it, but for rank 1.
    """
    mesh = two_by_two()
    model = build(mesh["shard"])
    optimizer = optimizer_of(method, model, mesh["replicate"].get_group())
    register(model, optimizer)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**16)
    seen = [weights(model)]
    for step in range(2):
        scaler.scale(model(own_batch(step)).square().mean()).backward()
        if overflows and step == 1 and dist.get_rank() == 3:
            parts = [gradient.to_local() for gradient in gradients_of(model)]
            next(part for part in parts if part.numel()).view(-1)[0] = torch.inf
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), CLIP_NORM)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        seen.append(weights(model))
    return [*seen, scaler.get_scale()]


@pytest.mark.parametrize("method", by_default(["signs"], ["low_communication"]))
def test_a_scaler_finds_the_same_on_all_ranks_that_share_a_model(
    ranks_of: RanksOf, method: str
) -> None:
    ranks = ranks_of(4)
    for *_, scale in ranks.run(under_a_scaler, method, False):
        assert scale == 2.0**16
    for rank, (_, before, after, scale) in enumerate(ranks.run(under_a_scaler, method, True)):
        assert scale == 2.0 ** (15 if rank >= 2 else 16), "the node of rank 3"
        if method == "signs":
            assert all(torch.equal(after[name], value) for name, value in before.items())


def clipped_over(groups: bool, method: str) -> list[Any]:
    """Return the norm, and the gradients that are left, by the optimizer's groups or the model."""
    mesh = two_by_two()
    model = build(mesh["shard"])
    optimizer = optimizer_of(method, model, mesh["replicate"].get_group())
    register(model, optimizer)
    model(own_batch(0)).square().mean().backward()
    own = [p for group in optimizer.param_groups for p in group["params"]]
    norm: Any = nn.utils.clip_grad_norm_(own if groups else model.parameters(), CLIP_NORM)
    return [float(norm.full_tensor()), *(g.full_tensor() for g in gradients_of(model))]


@pytest.mark.parametrize("method", by_default(["rounds"], ["signs", "low_communication"]))
def test_clipping_by_the_optimizers_groups_is_clipping_by_the_model(
    ranks_of: RanksOf, method: str
) -> None:
    """Ranks hold parts of different numbers of parameters, and torch takes norms one by one."""
    ranks = ranks_of(4)
    by_model, by_groups = (ranks.run(clipped_over, groups, method) for groups in (False, True))
    assert by_model[0][0] == by_model[1][0] != by_model[2][0] == by_model[3][0]
    for (norm, *gradients), (other_norm, *others) in zip(by_model, by_groups, strict=True):
        assert norm == pytest.approx(other_norm)
        assert norm > CLIP_NORM
        assert all(map(torch.allclose, gradients, others))


def partly_sharded(method: str) -> list[str]:
    mesh = two_by_two()
    model = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 4))
    fully_shard(model[0], mesh=mesh["shard"])
    optimizer = optimizer_of(method, model, mesh["replicate"].get_group())
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        register(model, optimizer)
    return [str(each.message) for each in caught]


@pytest.mark.parametrize("method", by_default(["signs"], ["rounds"]))
def test_parameters_that_nobody_averages_in_a_node_are_named(
    ranks_of: RanksOf, method: str
) -> None:
    for (message,) in ranks_of(4).run(partly_sharded, method):
        assert message.startswith("'2.weight' and 1 more is sharded over no ranks")


def fragments_of_a_small_head() -> int:
    mesh = init_device_mesh("cpu", (1, 4), mesh_dim_names=("replicate", "shard"))
    model = nn.Sequential(nn.Linear(1024, 512), nn.Tanh(), nn.Linear(512, 2))
    fully_shard(model, mesh=mesh["shard"])
    rounds = low_communication(
        model.named_parameters(),
        lr=1e-3,
        bits_per_parameter=0.02,
        process_group=mesh["replicate"].get_group(),
    )
    return len(rounds.round_state.clock.exchanged_at)


def test_ranks_that_hold_nothing_of_a_small_layer_cut_the_model_alike(ranks_of: RanksOf) -> None:
    """Two rows are on two of four ranks."""
    found = ranks_of(4).run(fragments_of_a_small_head)
    assert len(set(found)) == 1
    assert found[0] <= 2


def sharded_and_whole(method: str) -> Weights:
    """Train two nodes of two ranks whose data is that of one rank each."""

    def of_node(index: int) -> torch.Tensor:
        return batch(dist.get_rank() // 2, index)

    model, state = train(method, two_by_two(), "", range(STEPS), of_node)
    if hasattr(state, "synchronize"):
        state.synchronize()
    return weights(model)


def whole_only(method: str) -> Weights:
    model, state = train(method, None, "", range(STEPS), own_batch)
    if hasattr(state, "synchronize"):
        state.synchronize()
    return weights(model)


@pytest.mark.parametrize("method", by_default(["rounds"], ["uncompressed"]))
def test_sharding_changes_nothing_but_rounding(ranks_of: RanksOf, method: str) -> None:
    expected = ranks_of(2).run(whole_only, method)[0]
    for run in ranks_of(4).run(sharded_and_whole, method):
        for name, value in expected.items():
            # Of steps of 0.02: Adam enlarges the rounding of some small gradients.
            assert (run[name] - value).abs().mean() < 1e-4, name


def refused() -> None:
    mesh = two_by_two()
    narrow = fully_shard(nn.Linear(8, 1), mesh=mesh["shard"])
    for method in ("signs", "low_communication", "rounds"):
        with pytest.raises(ValueError, match="too few rows for the ranks that they are sharded"):
            optimizer_of(method, narrow, mesh["replicate"].get_group())
    for method in ("signs", "low_communication"):
        model = build(mesh["shard"])
        optimizer = optimizer_of(method, model, dist.group.WORLD)
        model(own_batch(0)).square().mean().backward()
        with pytest.raises(ValueError, match="the parameters are sharded over ranks"):
            optimizer.step()
    named = model.named_parameters()
    with pytest.raises(ValueError, match="inner='muon' needs whole matrices"):
        low_communication(named, lr=0.1, inner="muon", process_group=dist.group.WORLD)
    with pytest.raises(ValueError, match="OneBitLamb needs the norms of whole parameters"):
        OneBitLamb(model.named_parameters(), Exchange(Sign()), freeze_step=2)


def test_what_sharded_parameters_cannot_do_is_refused_on_all_ranks(ranks_of: RanksOf) -> None:
    ranks_of(4).run(refused)
