"""OneBitAdam at ZeRO stages 1 and 2: exact gradients until it freezes, then signs."""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

pytest.importorskip("deepspeed")

import itertools

from comm_hooks import Sign, register
from comm_hooks.optim import FrozenVarianceAdam
from tests.frameworks.deepspeed.common import (
    config,
    digest,
    engine_of,
    import_deepspeed,
    loss_of,
    net,
    parameters,
    train,
    train_ddp,
)
from tests.frameworks.selection import by_default
from tests.ranks import RanksOf

FREEZE, STEPS = 3, 7
PARAMS = {"lr": 0.01, "betas": [0.8, 0.95], "weight_decay": 0.1, "freeze_step": FREEZE}
# Without shards the mean does not depend on how gradients fall into buckets.
GATHERED = {"collective": "all_gather", "min_numel": 64}


def settings(stage: int, **more: Any) -> dict[str, Any]:
    one_bit = {"optimizer": {"type": "OneBitAdam", "params": dict(PARAMS)}}
    return config(stage, more.pop("block", GATHERED), **{**one_bit, **more})


def under_deepspeed_and_ddp(stage: int, accumulation: int) -> dict[str, Any]:
    engine = engine_of(settings(stage, accumulation=accumulation))
    train(engine, STEPS)

    ddp = DistributedDataParallel(net())
    signs = Sign(block_size=None, scale="rms")
    state = register(ddp, signs, start_compression_step=FREEZE, **GATHERED)
    optimizer = FrozenVarianceAdam(
        ddp.parameters(), **{**PARAMS, "betas": (0.8, 0.95)}, total_steps=STEPS
    )
    train_ddp(ddp, optimizer, STEPS, accumulation)
    ours, theirs = parameters(engine), dict(ddp.module.named_parameters())
    residuals, expected = (s.exchange.memory.state_dict() for s in (engine.comm_hooks, state))
    return {
        "error": max(float((ours[n] - theirs[n]).abs().max()) for n in ours),
        "moved": max(float((ours[n] - p).abs().max()) for n, p in net().named_parameters()),
        "residual error": max(float((residuals[n] - r).abs().max()) for n, r in expected.items()),
        "kind": type(engine.basic_optimizer).__name__,
    }


@pytest.mark.parametrize(("stage", "accumulation"), by_default([(1, 2)], [(1, 1), (2, 1)]))
def test_ends_as_the_same_run_under_ddp(ranks_of: RanksOf, stage: int, accumulation: int) -> None:
    for report in ranks_of(2).run(under_deepspeed_and_ddp, stage, accumulation):
        assert report["kind"] == "FrozenVarianceAdam"
        assert report["error"] < 1e-5
        assert report["residual error"] < 1e-5
        assert report["moved"] > 1e-2


def bytes_of_steps(stage: int, dtype: str) -> tuple[list[int], str, str]:
    """Return what each step moved, with the published exchange, and digests of start and end."""
    more: dict[str, Any] = {"fp16": {"enabled": True, "initial_scale_power": 8}}
    more = more if dtype == "fp16" else {"dtype": dtype}
    engine = engine_of(settings(stage, block={"min_numel": 64}, accumulation=2, **more))
    start, totals = digest(engine), [0]
    for step in range(STEPS):
        train(engine, 1, first=step)
        totals.append(int(engine.comm_hooks.stats()["bytes_sent"]))
    return (
        [after - before for before, after in itertools.pairwise(totals)],
        start,
        digest(engine),
    )


@pytest.mark.parametrize(
    ("stage", "dtype"),
    by_default([(2, "bf16")], [(1, "fp32"), (1, "bf16"), (1, "fp16"), (2, "fp32"), (2, "fp16")]),
)
def test_it_compresses_from_the_freeze_on(ranks_of: RanksOf, stage: int, dtype: str) -> None:
    results = ranks_of(3).run(bytes_of_steps, stage, dtype)
    for moved, start, end in results:
        assert end == results[0][2] != start, "replicas must not drift"
        assert len(set(moved[:FREEZE])) == 1
        assert max(moved[FREEZE:]) < moved[0] / (2 if dtype == "fp32" else 1.5)


def with_an_overflow(stage: int) -> dict[str, Any]:
    import_deepspeed()
    more = {"fp16": {"enabled": True, "initial_scale_power": 8, "hysteresis": 1}}
    engine = engine_of(settings(stage, **more))

    def loss(model: Any, step: int, dtype: torch.dtype) -> torch.Tensor:
        value = loss_of(model, step, dtype)
        return value * float("inf") if dist.get_rank() == 1 else value

    train(engine, 1)
    train(engine, 1, first=1, loss=loss)
    train(engine, FREEZE - 1, first=2)
    exact = engine.comm_hooks.stats()["residual_norm"]
    steps = {float(s["step"]) for s in engine.basic_optimizer.state.values()}
    train(engine, 1, first=FREEZE + 1)
    return {
        "skipped": engine.skipped_steps,
        "steps": steps,
        "exact": exact,
        "then": engine.comm_hooks.stats()["residual_norm"],
    }


@pytest.mark.parametrize("stage", by_default([1], [2]))
def test_a_skipped_step_does_not_count(ranks_of: RanksOf, stage: int) -> None:
    # Signs would begin a step before the second moment stands still.
    for report in ranks_of(2).run(with_an_overflow, stage):
        assert report["skipped"] == 1
        assert report["steps"] == {FREEZE}
        assert report["exact"] == 0
        assert report["then"] > 0


def resumed(folder: str, stage: int, at: int) -> tuple[str, str]:
    straight = engine_of(settings(stage, block={"min_numel": 64}))
    train(straight, at)
    straight.save_checkpoint(folder)
    train(straight, STEPS - at, first=at)
    later = engine_of(settings(stage, block={"min_numel": 64}), net())
    later.load_checkpoint(folder)
    train(later, STEPS - at, first=at)
    return digest(straight), digest(later)


@pytest.mark.parametrize(
    ("stage", "at"),
    by_default([(1, FREEZE + 2)], [(1, FREEZE - 1), (2, FREEZE - 1), (2, FREEZE + 2)]),
)
def test_resumes_bit_for_bit(ranks_of: RanksOf, stage: int, at: int, tmp_path: Path) -> None:
    for straight, later in ranks_of(2).run(resumed, str(tmp_path), stage, at):
        assert straight == later


def without_the_optimizer(folder: str, stage: int) -> tuple[float, float]:
    """Return residuals after the warm-up of an optimizer that begins on a loaded model."""
    before = engine_of(settings(stage))
    train(before, FREEZE + 2)
    before.save_checkpoint(folder)
    engine = engine_of(settings(stage), net())
    engine.load_checkpoint(folder, load_optimizer_states=False)
    train(engine, FREEZE)
    exact = engine.comm_hooks.stats()["residual_norm"]
    train(engine, 1, first=FREEZE)
    return exact, engine.comm_hooks.stats()["residual_norm"]


@pytest.mark.parametrize("stage", by_default([1], [2]))
def test_an_optimizer_that_begins_has_a_warm_up(
    ranks_of: RanksOf, stage: int, tmp_path: Path
) -> None:
    for exact, then in ranks_of(2).run(without_the_optimizer, str(tmp_path), stage):
        assert exact == 0
        assert then > 0
