"""Files of all ranks beside a checkpoint: all of them are restored, or all ranks refuse alike."""

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp

from comm_hooks import ErrorFeedback, Exchange, TopK
from comm_hooks.checkpoints.distributed_checkpoint import RankStates
from comm_hooks.checkpoints.rank_files import load_rank_files, save_rank_file
from comm_hooks.checkpoints.sealing import sealed
from comm_hooks.exchange.saved_state import seal_own
from tests.ranks import RanksOf


def exchange_after(rounds: int) -> Exchange:
    exchange = Exchange(TopK(density=0.05), ErrorFeedback(), collective="all_gather")
    for step in range(rounds):
        generator = torch.Generator().manual_seed(10 * step + dist.get_rank())
        exchange.average_({"w": torch.randn(64, 64, generator=generator)})
    return exchange


def residual(exchange: Exchange) -> torch.Tensor:
    assert exchange.memory
    return exchange.memory.state_dict().get("w", torch.zeros(64 * 64))


def save(folder: str, rounds: int) -> torch.Tensor:
    exchange = exchange_after(rounds)
    save_rank_file(exchange, folder)
    return residual(exchange)


def load(folder: str, **options: Any) -> tuple[bool, int, torch.Tensor, list[str]]:
    exchange = exchange_after(1)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        found = load_rank_files(exchange, folder, **options)
    return found, exchange.step, residual(exchange), [str(w.message) for w in caught]


def test_every_rank_gets_its_own_residual_back(ranks_of: RanksOf, tmp_path: Path) -> None:
    folder = tmp_path / "not" / "there"
    saved = ranks_of(2).run(save, str(folder), 3)
    assert not torch.equal(saved[0], saved[1])
    assert sorted(p.name for p in folder.iterdir()) == ["rank0.pt", "rank1.pt"]
    loaded = ranks_of(2).run(load, str(folder))
    for before, (found, step, after, messages) in zip(saved, loaded, strict=True):
        assert found
        assert step == 3
        assert torch.equal(before, after)
        assert not messages


@pytest.mark.parametrize(("before", "after"), [(4, 2), (2, 4)])
def test_the_mean_residual_survives_another_number_of_ranks(
    ranks_of: RanksOf, tmp_path: Path, before: int, after: int
) -> None:
    saved = ranks_of(before).run(save, str(tmp_path), 3)
    loaded = ranks_of(after).run(load, str(tmp_path))
    assert all(step == 3 for _, step, _, _ in loaded)
    mean = torch.stack([residual for _, _, residual, _ in loaded]).mean(0)
    assert torch.allclose(mean, torch.stack(saved).mean(0), atol=1e-6)


def test_files_left_by_more_ranks_are_not_read(ranks_of: RanksOf, tmp_path: Path) -> None:
    ranks_of(4).run(save, str(tmp_path), 3)
    saved = ranks_of(2).run(save, str(tmp_path), 2)
    for world in (2, 4):
        loaded = ranks_of(world).run(load, str(tmp_path))
        assert all(step == 2 for _, step, _, _ in loaded)
        mean = torch.stack([residual for _, _, residual, _ in loaded]).mean(0)
        assert torch.allclose(mean, torch.stack(saved).mean(0), atol=1e-6)


def test_no_files_at_all_is_a_warning(ranks_of: RanksOf, tmp_path: Path) -> None:
    for found, step, _, messages in ranks_of(2).run(load, str(tmp_path)):
        assert not found
        assert step == 1, "nothing is changed"
        assert messages == [f"{tmp_path} has no files of comm_hooks: residuals start from zero"]


def damage(name: str, folder: Path) -> None:
    if name.startswith("missing"):
        (folder / f"{name.split()[1]}.pt").unlink()
    elif name == "truncated rank1":
        (folder / "rank1.pt").write_bytes((folder / "rank1.pt").read_bytes()[:100])
    elif name == "foreign rank1":
        torch.save({"model": {}}, folder / "rank1.pt")
    elif name == "older rank1":
        state = torch.load(folder / "rank1.pt", weights_only=True)["state"]
        torch.save(
            sealed({"state": seal_own({**state, "step": 2}), "ranks": [0, 1]}), folder / "rank1.pt"
        )
    elif name == "changed rank1":
        file = torch.load(folder / "rank1.pt", weights_only=True)
        next(iter(file["state"]["memory"].values()))[0] += 1
        torch.save(file, folder / "rank1.pt")
    elif name == "cut rank1":
        state = torch.load(folder / "rank1.pt", weights_only=True)["state"]
        torch.save(
            sealed({"state": {**state, "numels": None}, "ranks": [0, 1]}), folder / "rank1.pt"
        )


DAMAGES = {
    "missing rank0": "rank0.pt is missing",
    "missing rank1": "rank1.pt is missing: residuals of all 2 ranks are needed",
    "truncated rank1": "rank1.pt cannot be read (",
    "foreign rank1": "rank1.pt is no file of comm_hooks",
    "older rank1": "rank1.pt is of another checkpoint than rank 0's",
    "changed rank1": "rank1.pt cannot be read (the state is damaged, its content does not match",
    "cut rank1": "the state is damaged, its content does not match its digest",
}


@pytest.mark.parametrize(
    ("name", "world"),
    [*((name, 2) for name in DAMAGES), ("missing rank1", 4), ("changed rank1", 4)],
)
def test_all_ranks_refuse_an_incomplete_set(
    ranks_of: RanksOf, tmp_path: Path, name: str, world: int
) -> None:
    ranks_of(2).run(save, str(tmp_path), 3)
    damage(name, tmp_path)
    messages = {str(outcome.error) for outcome in ranks_of(world).outcomes(load, str(tmp_path))}
    assert len(messages) == 1, "ranks must agree"
    assert DAMAGES[name] in messages.pop()


def load_of_step(folder: str) -> None:
    load(folder, step=7)


def test_the_files_of_another_checkpoint_are_refused(ranks_of: RanksOf, tmp_path: Path) -> None:
    ranks_of(2).run(save, str(tmp_path), 3)
    for outcome in ranks_of(2).outcomes(load_of_step, str(tmp_path)):
        assert isinstance(outcome.error, ValueError)
        assert "was saved after 3 exchanges, but the checkpoint after 7" in str(outcome.error)


def load_alone_unreadable(folder: str) -> str:
    """The disk fails on one rank only: the others must hear of it and not wait."""

    def read(path: str) -> dict[str, Any]:
        if dist.get_rank() == 3:
            raise OSError("Input/output error")
        return torch.load(path, weights_only=True)

    try:
        load_rank_files(exchange_after(1), folder, read=read)
    except ValueError as error:
        return str(error)
    return ""


def test_a_disk_that_fails_on_one_rank_stops_all(ranks_of: RanksOf, tmp_path: Path) -> None:
    for saved_by in (4, 2):
        ranks_of(saved_by).run(save, str(tmp_path), 2)
        for message in ranks_of(4).run(load_alone_unreadable, str(tmp_path)):
            assert "cannot be read (Input/output error)" in message


def in_columns(columns: int, action: Callable[[Exchange], object]) -> tuple[int, torch.Tensor]:
    """Let each column of a grid of ranks exchange by itself; return the steps and the residual."""
    world = dist.get_world_size()
    groups = [dist.new_group(list(range(c, world, columns))) for c in range(columns)]
    column = dist.get_rank() % columns
    exchange = Exchange(
        TopK(density=0.05), ErrorFeedback(), "all_gather", process_group=groups[column]
    )
    generator = torch.Generator().manual_seed(dist.get_rank())
    exchange.average_({"w": torch.randn(64, 64, generator=generator)})
    action(exchange)
    return column, residual(exchange)


def saved_in_columns(folder: str, columns: int) -> tuple[int, torch.Tensor]:
    def action(exchange: Exchange) -> None:
        save_rank_file(exchange, folder)
        dcp.save({"hook": RankStates(exchange)}, checkpoint_id=f"{folder}/distributed")

    return in_columns(columns, action)


def loaded_in_columns(folder: str, columns: int, distributed: bool) -> tuple[int, torch.Tensor]:
    def action(exchange: Exchange) -> None:
        exchange.average_({"w": torch.ones(64, 64)})
        if distributed:
            RankStates(exchange).load("hook", f"{folder}/distributed")
        else:
            assert load_rank_files(exchange, folder)

    return in_columns(columns, action)


@pytest.mark.parametrize("distributed", [False, True], ids=["files", "checkpoint"])
@pytest.mark.parametrize("after", [4, 2, pytest.param(6, marks=pytest.mark.slow)])
def test_ranks_that_exchange_in_columns_share_a_folder(
    ranks_of: RanksOf, tmp_path: Path, after: int, distributed: bool
) -> None:
    """As the shards of FSDP2 do: each column gets back what is its own, on more or fewer rows."""
    saved = ranks_of(4).run(saved_in_columns, str(tmp_path), 2)
    loaded = ranks_of(after).run(loaded_in_columns, str(tmp_path), 2, distributed)
    if after == 4:
        assert all(torch.equal(a, b) for (_, a), (_, b) in zip(saved, loaded, strict=True))
    for column in range(2):
        own = [torch.stack([r for c, r in ends if c == column]) for ends in (saved, loaded)]
        torch.testing.assert_close(own[0].mean(0), own[1].mean(0), atol=1e-6, rtol=0)
    assert not torch.allclose(saved[0][1], saved[1][1])


@pytest.mark.parametrize("distributed", [False, True], ids=["files", "checkpoint"])
def test_what_several_groups_remember_is_not_mixed(
    ranks_of: RanksOf, tmp_path: Path, distributed: bool
) -> None:
    ranks_of(4).run(saved_in_columns, str(tmp_path), 2)
    for outcome in ranks_of(4).outcomes(loaded_in_columns, str(tmp_path), 1, distributed):
        assert isinstance(outcome.error, ValueError)
        assert "exchanged in several groups when they saved, ranks [0, 2] and ranks [1, 3]" in str(
            outcome.error
        )
