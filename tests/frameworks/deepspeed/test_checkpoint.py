"""Every rank's state is in the checkpoint's folder, and a resumed run ends as one that went on."""

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from comm_hooks.checkpoints.sealing import sealed
from tests.frameworks.deepspeed.common import (
    TOPK,
    config,
    digest,
    engine_of,
    net,
    parameters,
    to_universal,
    train,
)
from tests.frameworks.selection import by_default
from tests.ranks import Ranks, RanksOf

pytest.importorskip("deepspeed", reason="needs DeepSpeed: pip install deepspeed")


GATHERED = {**TOPK, "collective": "all_gather"}


def resumed(folder: str, stage: int, block: dict[str, Any], tag: str | None) -> dict[str, str]:
    settings = config(stage, block, accumulation=2)
    straight = engine_of(settings)
    train(straight, 3)
    straight.save_checkpoint(folder, tag)
    train(straight, 3, first=3)
    later = engine_of(settings, net())
    later.load_checkpoint(folder)
    train(later, 3, first=3)
    forgetful = engine_of(settings, net())
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        forgetful.load_checkpoint(folder, load_module_only=True)
    return {
        "straight": digest(straight),
        "resumed": digest(later),
        "steps": str(later.comm_hooks.stats()["steps"] == straight.comm_hooks.stats()["steps"]),
        "fresh": str(forgetful.comm_hooks.exchange.step),
    }


@pytest.mark.parametrize(
    ("stage", "block"),
    by_default(
        [(0, TOPK), (1, {**TOPK, "collective": "sharded"})],
        [(2, {**TOPK, "memory": {"type": "error_feedback", "bits": 4}})],
    ),
)
def test_a_resumed_run_ends_as_one_that_went_on(
    ranks_of: RanksOf, stage: int, block: dict[str, Any], tmp_path: Path
) -> None:
    tag = None if stage else "my_tag"
    for report in ranks_of(2).run(resumed, str(tmp_path), stage, block, tag):
        assert report["straight"] == report["resumed"]
        assert report["steps"] == "True"
        assert report["fresh"] == "0", "load_module_only must leave the exchange alone"
    names = sorted(p.name for p in (tmp_path / (tag or "global_step3")).glob("comm_hooks/*"))
    assert names == ["rank0.pt", "rank1.pt"]


def save(folder: str, stage: int, tag: str = "tag") -> Any:
    engine = engine_of(config(stage, GATHERED))
    train(engine, 3)
    engine.save_checkpoint(folder, tag)
    return parameters(engine), engine.comm_hooks.exchange.memory.state_dict()


def load(folder: str, stage: int, tag: str = "tag", **more: Any) -> Any:
    engine = engine_of(config(stage, GATHERED, **more))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        engine.load_checkpoint(folder, tag)
    texts = [str(w.message) for w in caught if "comm_hooks" in str(w.message)]
    restored = parameters(engine)
    residuals = {n: r.clone() for n, r in engine.comm_hooks.exchange.memory.state_dict().items()}
    train(engine, 2, first=3)
    return restored, residuals, digest(engine), texts


@pytest.mark.parametrize("stage", by_default([0], [1]))
def test_another_number_of_ranks_keeps_what_was_not_sent(
    ranks_of: RanksOf, stage: int, tmp_path: Path
) -> None:
    saved = ranks_of(3).run(save, str(tmp_path), stage)
    tag, more = "tag", {}
    if stage:
        ranks_of(3).run(to_universal, str(tmp_path))
        tag, more = "tag_universal", {"checkpoint": {"load_universal": True}}
    loaded = ranks_of(2).run(_load_with, str(tmp_path), stage, tag, more)
    for restored, residuals, end, texts in loaded:
        assert texts == []
        assert end == loaded[0][2]
        for name, value in saved[0][0].items():
            assert torch.equal(restored[name], value)
        for name, residual in residuals.items():
            mean = sum(memory[name] for _, memory in saved) / 3
            assert float(mean.abs().max()) > 0
            assert torch.allclose(residual, mean, atol=1e-6)


def _load_with(folder: str, stage: int, tag: str, more: dict[str, Any]) -> Any:
    return load(folder, stage, tag, **more)


def refused(ranks: Ranks, folder: Path, stage: int = 0) -> list[str]:
    """Return what every rank says when it may not load."""
    outcomes = ranks.outcomes(load, str(folder), stage)
    assert all(isinstance(o.error, ValueError) for o in outcomes), [o.trace for o in outcomes]
    return [str(outcome.error) for outcome in outcomes]


def test_bad_files_are_refused_on_all_ranks(ranks_of: RanksOf, tmp_path: Path) -> None:
    ranks_of(2).run(save, str(tmp_path), 0)
    first, second = sorted((tmp_path / "tag").glob("comm_hooks/*"))
    good = first.read_bytes(), second.read_bytes()
    second.unlink()
    for text in refused(ranks_of(2), tmp_path):
        assert f"{second} is missing" in text
    second.write_bytes(good[0])
    for text in refused(ranks_of(2), tmp_path):
        assert "got ranks [0, 0]" in text
    second.write_bytes(b"not a checkpoint")
    for text in refused(ranks_of(2), tmp_path):
        assert f"{second} cannot be read" in text
    second.write_bytes(good[1])
    for path in (first, second):
        content = torch.load(path, weights_only=True)
        state = {**content["state"], "global_step": 2}
        torch.save(sealed({"state": state, "ranks": content["ranks"]}), path)
    for text in refused(ranks_of(2), tmp_path):
        assert "are of step 2, but the checkpoint of step 3" in text


def renamed(folder: str) -> None:
    engine = engine_of(config(0, GATHERED), torch.nn.Sequential(net()))
    engine.load_checkpoint(folder, "tag", load_module_strict=False)


def test_residuals_of_parameters_that_are_gone_are_refused(
    ranks_of: RanksOf, tmp_path: Path
) -> None:
    ranks_of(2).run(save, str(tmp_path), 0)
    for outcome in ranks_of(2).outcomes(renamed, str(tmp_path)):
        assert isinstance(outcome.error, ValueError), outcome.trace
        assert "a.weight" in str(outcome.error)


def test_a_checkpoint_without_compression_loads_with_a_warning(
    ranks_of: RanksOf, tmp_path: Path
) -> None:
    saved = ranks_of(2).run(save, str(tmp_path), 0)
    for path in (tmp_path / "tag").glob("comm_hooks/*"):
        path.unlink()
    for restored, residuals, _, texts in ranks_of(2).run(load, str(tmp_path), 0):
        assert torch.equal(restored["b.weight"], saved[0][0]["b.weight"])
        assert residuals == {}
        assert len(texts) == 1
        assert "residuals start from zero" in texts[0]


def order_of_writes(folder: str) -> list[bool]:
    engine = engine_of(config(0, TOPK))
    train(engine, 1)
    there = []
    save_engine = engine._save_checkpoint

    def watch(*args: Any, **kwargs: Any) -> Any:
        path = Path(folder) / "tag" / "comm_hooks" / f"rank{dist.get_rank()}.pt"
        there.append(path.exists())
        return save_engine(*args, **kwargs)

    engine._save_checkpoint = watch
    engine.save_checkpoint(folder, tag="tag")
    return there


def test_side_files_are_there_before_deepspeed_writes(ranks_of: RanksOf, tmp_path: Path) -> None:
    assert ranks_of(2).run(order_of_writes, str(tmp_path)) == [[True], [True]]
