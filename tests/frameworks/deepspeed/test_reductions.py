"""Gradients under DeepSpeed go through the exchange, and nothing else changes."""

import copy
from collections.abc import Mapping
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from comm_hooks import ErrorFeedback, TopK, register
from tests.frameworks.deepspeed.common import (
    HIDDEN,
    IDENTITY,
    INPUTS,
    OUTPUTS,
    TOPK,
    Net,
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

pytest.importorskip("deepspeed", reason="needs DeepSpeed: pip install deepspeed")


OFFLOADED = {
    "zero_optimization": {"offload_optimizer": {"device": "cpu"}},
    "zero_force_ds_cpu_optimizer": False,
}
FLOAT32_SUMS = {"dtype": "bf16", "data_types": {"grad_accum_dtype": "fp32"}}
FP16 = {"fp16": {"enabled": True, "initial_scale_power": 6}}
# Gradient accumulation 4 and clipping apply to these, too.
VARIANTS: dict[str, tuple[int, dict[str, Any]]] = {
    "stage 0": (0, {}),
    "stage 1, bf16": (1, {"dtype": "bf16"}),
    "stage 2, fp16": (2, FP16),
    "stage 2, overlapping": (2, {"zero_optimization": {"overlap_comm": True}}),
    "stage 1, bf16, float32 sums (BF16_Optimizer)": (1, FLOAT32_SUMS),
}
MORE_VARIANTS: dict[str, tuple[int, dict[str, Any]]] = {
    "stage 0, bf16": (0, {"dtype": "bf16"}),
    "stage 0, fp16": (0, FP16),
    "stage 1, round robin": (1, {"zero_optimization": {"round_robin_gradients": True}}),
    "stage 2, larger than a bucket": (2, {"zero_optimization": {"reduce_bucket_size": 1000}}),
    "stage 1, offloaded": (1, OFFLOADED),
    "stage 2, offloaded": (2, OFFLOADED),
    # DeepSpeed's own reduction must be told to send float32, too.
    "stage 2, bf16, float32 sums": (2, {**FLOAT32_SUMS, "communication_data_type": "fp32"}),
}


def without_and_with_identity(stage: int, more: Mapping[str, Any]) -> dict[str, Any]:
    digests = []
    for block in (None, IDENTITY):
        settings = config(
            stage, block, accumulation=4, gradient_clipping=0.5, **copy.deepcopy(dict(more))
        )
        client = None
        if "zero_force_ds_cpu_optimizer" in more:
            del settings["optimizer"]
            model = net()
            client = torch.optim.AdamW(model.parameters(), lr=0.01)
            engine = engine_of(settings, model, optimizer=client)
        else:
            engine = engine_of(settings)
        if block is None and type(engine.optimizer).__name__ == "BF16_Optimizer":
            # It would round float32 sums to bfloat16 before it sends them.
            engine.communication_data_type = torch.float32
        start = digest(engine)
        train(engine, 3)
        digests.append(digest(engine))
        assert digests[-1] != start
    return {
        "plain": digests[0],
        "ours": digests[1],
        "wrapper": type(engine.optimizer).__name__,
        "stats": engine.comm_hooks.stats(),
    }


@pytest.mark.parametrize("variant", by_default(VARIANTS, MORE_VARIANTS))
@pytest.mark.filterwarnings("ignore:communication_data_type")
def test_identity_is_stock_deepspeed_bit_for_bit(ranks_of: RanksOf, variant: str) -> None:
    stage, more = {**VARIANTS, **MORE_VARIANTS}[variant]
    reports = ranks_of(2).run(without_and_with_identity, stage, more)
    for report in reports:
        assert report["plain"] == report["ours"]
        # Stage 2 exchanges in every backward pass.
        assert report["stats"]["steps"] == (12 if stage == 2 else 3)
        assert report["stats"]["bytes_sent"] > 0
    assert reports[0]["ours"] == reports[1]["ours"]
    if "BF16_Optimizer" in variant:
        assert reports[0]["wrapper"] == "BF16_Optimizer"


def under_deepspeed_and_ddp(stage: int, accumulation: int) -> dict[str, Any]:
    engine = engine_of(
        config(stage, {**TOPK, "collective": "all_gather"}, accumulation=accumulation)
    )
    buckets = []
    run_round = engine.comm_hooks.exchange.bucket_round

    def count(bucket: Any, *args: Any, **kwargs: Any) -> Any:
        buckets.append(bucket.layout.names)
        return run_round(bucket, *args, **kwargs)

    engine.comm_hooks.exchange.bucket_round = count
    train(engine, 4)

    ddp = DistributedDataParallel(net(), bucket_cap_mb=0.008)
    state = register(ddp, TopK(density=0.1), collective="all_gather", min_numel=64)
    optimizer = torch.optim.AdamW(ddp.parameters(), lr=0.01, weight_decay=0.01)
    train_ddp(ddp, optimizer, 4, accumulation)
    ours, theirs = parameters(engine), dict(ddp.module.named_parameters())
    residuals, expected = (s.exchange.memory.state_dict() for s in (engine.comm_hooks, state))
    return {
        "error": max(float((ours[n] - theirs[n]).abs().max()) for n in ours),
        "moved": max(float((ours[n] - p).abs().max()) for n, p in net().named_parameters()),
        "residual error": max(float((residuals[n] - r).abs().max()) for n, r in expected.items()),
        "residuals": (sorted(residuals), sorted(expected)),
        "buckets": len(buckets) // 4,
        "stats": (engine.comm_hooks.stats(), state.stats()),
    }


@pytest.mark.parametrize(
    ("stage", "accumulation"), by_default([(0, 2), (1, 1)], [(0, 1), (1, 2), (2, 1)])
)
def test_a_run_ends_as_the_same_run_under_ddp(
    ranks_of: RanksOf, stage: int, accumulation: int
) -> None:
    for report in ranks_of(2).run(under_deepspeed_and_ddp, stage, accumulation):
        assert report["error"] < 1e-6
        assert report["moved"] > 1e-2
        assert report["residual error"] < 1e-6
        assert (
            report["residuals"][0] == report["residuals"][1] == ["a.weight", "b.weight", "c.weight"]
        )
        assert report["buckets"] == (1 if stage == 0 else 3)
        ours, theirs = report["stats"]
        assert ours["steps"] == theirs["steps"] == 4
        assert ours["bytes_uncompressed"] == theirs["bytes_uncompressed"]
        assert ours["compression_ratio"] > 3


class Dropping(Net):
    """Leaves a layer out of every second step, on all ranks."""

    steps = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.steps += 1
        hidden = torch.relu(self.a(x))
        if self.steps % 2:
            hidden = torch.relu(self.b(hidden))
        return self.c(hidden) * self.scale.mean(0)


def with_unused_parameters(stage: int) -> tuple[float, float]:
    torch.manual_seed(1)
    ddp = DistributedDataParallel(Dropping(), find_unused_parameters=True)
    torch.manual_seed(1)
    settings = config(
        stage,
        {**TOPK, "collective": "all_gather"},
        optimizer={"type": "SGD", "params": {"lr": 0.1}},
        zero_allow_untested_optimizer=True,
    )
    engine = engine_of(settings, Dropping())
    register(ddp, TopK(density=0.1), memory=ErrorFeedback(), collective="all_gather", min_numel=64)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
    for step in range(5):
        optimizer.zero_grad()
        loss_of(ddp, step).backward()
        optimizer.step()
        train(engine, 1, first=step)
    ours, theirs = parameters(engine), dict(ddp.module.named_parameters())
    return (
        max(float((ours[n] - theirs[n]).abs().max()) for n in ours),
        engine.comm_hooks.stats()["residual_norm"],
    )


@pytest.mark.parametrize("stage", by_default([1], [0, 2]))
def test_residuals_stay_with_their_parameters_when_buckets_shift(
    ranks_of: RanksOf, stage: int
) -> None:
    # A parameter without a gradient is missing from ZeRO's buckets, and all others move up.
    for error, norm in ranks_of(2).run(with_unused_parameters, stage):
        assert error < 1e-6
        assert norm > 0


def with_an_overflow(stage: int) -> dict[str, Any]:
    import_deepspeed()
    more = {"fp16": {"enabled": True, "initial_scale_power": 8, "hysteresis": 1}}
    engine = engine_of(config(stage, TOPK, **more))
    train(engine, 2)
    before, scale = digest(engine), engine.optimizer.loss_scale
    residuals = engine.comm_hooks.exchange.memory.state_dict()
    residuals = {name: row.clone() for name, row in residuals.items()}

    def loss(model: Any, step: int, dtype: torch.dtype) -> torch.Tensor:
        value = loss_of(model, step, dtype)
        return value * float("inf") if dist.get_rank() == 1 else value

    train(engine, 1, first=2, loss=loss)
    skipped = digest(engine) == before and engine.skipped_steps == 1
    kept = engine.comm_hooks.exchange.memory.state_dict()
    report = {
        "skipped": skipped,
        "halved": engine.optimizer.loss_scale == scale / 2,
        "kept": all(torch.equal(kept[name], row) for name, row in residuals.items()),
    }
    train(engine, 2, first=3)
    return {**report, "digest": digest(engine), "goes on": digest(engine) != before}


@pytest.mark.parametrize("stage", by_default([0, 1], [2]))
def test_an_overflow_on_one_rank_is_skipped_by_all(ranks_of: RanksOf, stage: int) -> None:
    reports = ranks_of(2).run(with_an_overflow, stage)
    assert reports[0] == reports[1]
    assert all(reports[0].values()), reports[0]


def residual_in_units_of_the_step(stage: int) -> list[float]:
    """Return the residual, times the loss scale, over the gradient, for two scales."""
    results = []
    for power in (4, 9):
        engine = engine_of(
            config(stage, TOPK, fp16={"enabled": True, "initial_scale_power": power})
        )
        norms: list[float] = []
        weight = engine.module.b.weight
        weight.register_hook(lambda grad, norms=norms: norms.append(float(grad.float().norm())))
        train(engine, 1)
        residual = engine.comm_hooks.stats()["residual_norm"]
        results.append(residual * engine.optimizer.loss_scale / norms[0])
    return results


@pytest.mark.parametrize("stage", by_default([1], [0, 2]))
def test_residuals_are_kept_in_units_of_the_step(ranks_of: RanksOf, stage: int) -> None:
    # Not in those of scaled gradients: the scale changes while the residual waits.  (Written so
    # that it holds whether the loss is scaled or not: DeepSpeed 0.19.8 forgets to at stage 0.)
    small, large = ranks_of(2).run(residual_in_units_of_the_step, stage)[0]
    assert small == pytest.approx(large, rel=0.01)
    assert 0.5 < small < 5


class Table(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(30, INPUTS, sparse=True)
        self.head = nn.Linear(INPUTS, HIDDEN)
        self.out = nn.Linear(HIDDEN, OUTPUTS)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.out(torch.relu(self.head(self.table(x.argmax(1)) + x)))


def sparse_embedding() -> list[dict[str, Any]]:
    results = []
    for block in (None, IDENTITY):
        torch.manual_seed(2)
        settings = config(0, block, optimizer={"type": "SGD", "params": {"lr": 0.1}})
        engine = engine_of(settings, Table())
        train(engine, 3)
        results.append(parameters(engine))
    return results


def test_sparse_gradients_are_averaged_exactly(ranks_of: RanksOf) -> None:
    for plain, ours in ranks_of(2).run(sparse_embedding):
        for name, value in plain.items():
            assert torch.allclose(value, ours[name], atol=1e-7), name


def buckets_of_whole_gradients() -> dict[str, Any]:
    """Gradients of two dtypes and a limit that cuts them."""
    model = net()
    model.b.to(torch.bfloat16)
    engine = engine_of(config(0, IDENTITY), model)
    gradients = {}
    for name, parameter in engine.module.named_parameters():
        parameter.grad = torch.full_like(parameter, dist.get_rank() + len(name))
        gradients[name] = parameter.grad
    seen = []
    run_round = engine.comm_hooks.exchange.bucket_round
    engine.comm_hooks.exchange.bucket_round = lambda bucket, tensors, **k: (
        seen.append((tensors[0].dtype, sorted(bucket.layout.names)))
        or run_round(bucket, tensors, **k)
    )
    engine._reduce_non_expert_gradients(list(gradients.values()), elements_per_buffer=900)
    return {
        "seen": seen,
        "right": all(bool((g == 0.5 + len(n)).all()) for n, g in gradients.items()),
    }


def test_whole_gradients_are_cut_into_buckets_by_dtype_and_size(ranks_of: RanksOf) -> None:
    for report in ranks_of(2).run(buckets_of_whole_gradients):
        assert report["right"]
        assert report["seen"] == [
            (torch.float32, ["a.weight", "scale"]),
            (torch.bfloat16, ["b.weight"]),
            (torch.float32, ["a.bias", "c.bias", "c.weight"]),
            (torch.bfloat16, ["b.bias"]),
        ]
