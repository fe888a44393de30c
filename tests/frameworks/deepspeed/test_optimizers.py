"""Optimizers named in the JSON against the same ones without DeepSpeed, on real ranks."""

import warnings
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

pytest.importorskip("deepspeed")

from comm_hooks import ErrorFeedback, Exchange, Sign
from comm_hooks.exchange import ExchangeSettings
from comm_hooks.optim import OneBitAdam
from comm_hooks.optim.registry import OPTIMIZERS
from tests.frameworks.deepspeed.common import import_deepspeed
from tests.frameworks.deepspeed.optimizer_runs import (
    ACCUMULATION,
    PARAMS,
    distance,
    loss_of,
    minibatches,
    new_engine,
    new_model,
    settings,
    train,
    train_alone,
    values,
)
from tests.frameworks.selection import by_default
from tests.ranks import RanksOf

PUBLISHED = OneBitAdam.published
# One for each kind of exchange and of state.
USUAL = ["OneBitAdam", "ZeroOneAdam", "LocalVarianceAdam"]
OTHERS = [
    entry.type_name
    for entry in OPTIMIZERS.values()
    if entry.published and not entry.works_in_rounds and entry.name != "marina"
    if entry.type_name not in USUAL
]


def with_and_without(name: str) -> Any:
    params = PARAMS.get(name, {})
    engine = new_engine(settings(name, params))
    train(engine, minibatches())
    other = train_alone(name, params)
    moved = distance(engine.module, new_model())
    return distance(engine.module, other), moved, engine.comm_hooks.stats(), values(engine.module)


@pytest.mark.parametrize("name", by_default(USUAL, OTHERS))
def test_equals_the_optimizer_without_deepspeed(ranks_of: RanksOf, name: str) -> None:
    (error, moved, stats, own), (_, _, _, other) = ranks_of(2).run(with_and_without, name)
    assert error <= 1e-6
    assert moved > 1e-3
    assert stats["bytes_sent"] > 0
    if name != "ZeroOneAdam":  # whose replicas differ between synchronizations
        assert all(map(torch.equal, own, other))


def legacy_run() -> Any:
    params = {
        "lr": 2e-3,
        "betas": [0.9, 0.95],
        "eps": 1e-7,
        "weight_decay": 0.01,
        "freeze_step": 4,
        "cuda_aware": False,
        "comm_backend_name": "nccl",
        "bias_correction": True,
        "eps_inside_sqrt": False,
        "amsgrad": False,
        "max_grad_norm": 0.0,
    }
    warm_up = {"warmup_min_lr": 0, "warmup_max_lr": 2e-3, "warmup_num_steps": 6}
    config = settings(
        "onebitadam",  # DeepSpeed never minded the case
        params,
        scheduler={"type": "WarmupLR", "params": {**warm_up, "warmup_type": "linear"}},
        zero_optimization={"stage": 0},
    )
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        engine = new_engine(config)
    rates: list[float] = []

    def keep_rate(optimizer: Any, model: nn.Module, index: int) -> None:
        optimizer.param_groups[0]["lr"] = rates[index]

    for step in minibatches():
        rates.append(engine.get_lr()[0])
        train(engine, [step])
    kept = {key: params[key] for key in ("weight_decay", "eps", "freeze_step")}
    other = train_alone("OneBitAdam", {**kept, "betas": (0.9, 0.95)}, on_step=keep_rate)
    ignored = [str(w.message) for w in caught if "optimizer.params" in str(w.message)]
    return distance(engine.module, other), rates, ignored


def test_configuration_of_deepspeed_0_19_6(ranks_of: RanksOf) -> None:
    (error, rates, ignored), _ = ranks_of(2).run(legacy_run)
    assert error <= 1e-6
    assert rates[0] < rates[3] < rates[-1] == 2e-3
    assert len(ignored) == 1
    for name in ("cuda_aware", "comm_backend_name", "bias_correction", "eps_inside_sqrt"):
        assert name in ignored[0]


LIMIT = 0.5


def clip(optimizer: Any, model: nn.Module, index: int) -> None:
    """Clip by the mean of the ranks' norms."""
    gradients = [p.grad for p in model.parameters() if p.grad is not None]
    norm = torch.stack([g.norm() for g in gradients]).norm().reshape(1)
    norms = [torch.zeros_like(norm) for _ in range(dist.get_world_size())]
    dist.all_gather(norms, norm)
    assert norms[0] != norms[1]
    mean = float(sum(norms)) / len(norms)
    assert mean > 1.1 * LIMIT
    for gradient in gradients:
        # DeepSpeed adds 1e-6; rounded as there, since bfloat16 models show the last bit.
        gradient.mul_(1 / ((mean + 1e-6) / LIMIT))


def sixteen_bits(dtype: torch.dtype, limit: float) -> Any:
    """Train in 16 bits in an engine, and by hand with float32 copies and local gradients."""
    name, params = "OneBitAdam", PARAMS["OneBitAdam"]
    kind = "bf16" if dtype == torch.bfloat16 else "fp16"
    block = {"enabled": True}
    if kind == "fp16":
        block["initial_scale_power"] = 4
    more = {"gradient_clipping": limit} if limit else {}
    engine = new_engine(settings(name, params, **{kind: block}, **more))
    train(engine, minibatches())
    returned = engine.backward(loss := loss_of(engine, *minibatches(1)[0][0]))
    torch.testing.assert_close(returned, loss / ACCUMULATION)

    model = new_model().to(dtype)
    copies = {n: nn.Parameter(p.detach().float()) for n, p in model.named_parameters()}
    exchange = Exchange(ExchangeSettings.from_dict(PUBLISHED))
    optimizer = OneBitAdam(copies.items(), exchange, **params)
    scale = float(engine.optimizer.loss_scale)
    for index, step in enumerate(minibatches()):
        for inputs, targets in step:
            (loss_of(model, inputs, targets) / len(step) * scale).backward()
        for parameter, copy in zip(model.parameters(), copies.values(), strict=True):
            assert parameter.grad is not None
            copy.grad = parameter.grad.float() / scale
            parameter.grad = None
        if limit:
            holder = nn.ParameterList(copies.values())
            clip(optimizer, holder, index)
        optimizer.step()
        for parameter, copy in zip(model.parameters(), copies.values(), strict=True):
            parameter.data.copy_(copy)
    masters = [p for group in engine.basic_optimizer.param_groups for p in group["params"]]
    errors = [
        float((a - b).detach().abs().max()) for a, b in zip(masters, copies.values(), strict=True)
    ]
    names = engine.basic_optimizer.param_groups[0]["param_names"]
    norm = engine.get_global_grad_norm()
    return max(errors), distance(engine.module, model), names, norm, values(engine.module)


@pytest.mark.parametrize(
    ("dtype", "limit"),
    by_default([(torch.float16, LIMIT)], [(torch.bfloat16, LIMIT), (torch.bfloat16, 0.0)]),
)
def test_sixteen_bits(ranks_of: RanksOf, dtype: torch.dtype, limit: float) -> None:
    first, second = ranks_of(2).run(sixteen_bits, dtype, limit)
    for error, error_of_model, names, _, _ in (first, second):
        assert error <= 1e-6
        assert error_of_model <= 1e-2  # one unit in the last place
        assert names == [name for name, _ in new_model().named_parameters()]
    assert first[3] == second[3] > 0, "ranks must report one norm"
    assert all(map(torch.equal, first[4], second[4]))


def poisoned(name: str, poison: float, more: dict[str, Any]) -> Any:
    """Train with a gradient on rank 1 at one step that is not finite, or too large to square."""
    engine = new_engine(settings(name, PARAMS.get(name), accumulation=1, **more))
    steps = minibatches(8, accumulation=1)
    scales = []
    for index, step in enumerate(steps):
        before = values(engine.module)
        for inputs, targets in step:
            engine.backward(loss_of(engine, inputs, targets))
            if index == 5 and dist.get_rank() == 1:
                next(engine.module.parameters()).grad.view(-1)[3] = poison
            engine.step()
        if index == 5:
            stayed = all(map(torch.equal, before, values(engine.module)))
        scales.append(getattr(engine.optimizer, "loss_scale", 1.0))
    return stayed, engine.skipped_steps, scales, values(engine.module)


@pytest.mark.parametrize(
    ("name", "poison", "more"),
    by_default(
        [
            ("OneBitAdam", float("nan"), {}),
            # Finite, but its square is not: this rank alone must not stay away.
            ("OneBitAdam", 1e25, {"bf16": {"enabled": True}, "gradient_clipping": 1.0}),
            ("OneBitAdam", float("inf"), {"fp16": {"enabled": True, "hysteresis": 1}}),
        ],
        [
            ("DGC", float("nan"), {"gradient_clipping": 1.0}),
        ],
    ),
)
def test_all_ranks_skip_alike(
    ranks_of: RanksOf, name: str, poison: float, more: dict[str, Any]
) -> None:
    first, second = ranks_of(2).run(poisoned, name, poison, more)
    for stayed, skipped, _, _ in (first, second):
        assert stayed
        assert skipped == 1
    assert first[2] == second[2]
    if "fp16" in more:
        assert first[2][5] == first[2][4] / 2
    assert all(map(torch.equal, first[3], second[3]))
    assert all(bool(v.isfinite().all()) for v in first[3])


def passed_as_object() -> float:
    more = {"bf16": {"enabled": True}}
    model = new_model()
    exchange = Exchange(Sign(block_size=None, scale="rms"), ErrorFeedback(), "sharded")
    optimizer = OneBitAdam(model.named_parameters(), exchange, **PARAMS["OneBitAdam"])
    config = settings("OneBitAdam", **more)
    del config["optimizer"]
    engine = new_engine(config, model, optimizer=optimizer)
    train(engine, minibatches())
    named = new_engine(settings("OneBitAdam", PARAMS["OneBitAdam"], **more))
    train(named, minibatches())
    return distance(engine.module, named.module)


def test_an_optimizer_that_the_user_made_is_that_of_the_json(ranks_of: RanksOf) -> None:
    assert ranks_of(2).run(passed_as_object) == [0.0, 0.0]


def decays_once() -> float:
    """Return how far the float32 copies are from the model before the first step."""
    params = {"lr": 0.1, "weight_decay": 0.5}
    engine = new_engine(settings("AMSGrad", params, bf16={"enabled": True}))
    masters = engine.basic_optimizer.param_groups[0]["params"]
    return max(
        float((m - p.float()).detach().abs().max())
        for m, p in zip(masters, engine.module.parameters(), strict=True)
    )


def test_the_wrapper_of_16_bits_decays_nothing(ranks_of: RanksOf) -> None:
    assert ranks_of(2).run(decays_once) == [0.0, 0.0]


def in_a_pipeline(more: dict[str, Any]) -> float:
    deepspeed = import_deepspeed()
    deepspeed.init_distributed("gloo")
    loss = nn.functional.cross_entropy
    model = deepspeed.pipe.PipelineModule(list(new_model()), num_stages=1, loss_fn=loss)
    # Its layers have been made anew, with other random numbers.
    for own, other in zip(model.parameters(), new_model().parameters(), strict=True):
        own.data.copy_(other.data)
    engine = new_engine(settings("OneBitAdam", PARAMS["OneBitAdam"], **more), model)
    for step in minibatches():
        engine.train_batch(iter(step))
    return distance(model, train_alone("OneBitAdam", PARAMS["OneBitAdam"]))


def test_a_pipeline_of_one_stage(ranks_of: RanksOf) -> None:
    assert max(ranks_of(2).run(in_a_pipeline, {})) <= 1e-6
    for outcome in ranks_of(2).outcomes(in_a_pipeline, {"bf16": {"enabled": True}}):
        assert isinstance(outcome.error, ValueError), outcome.trace
        assert "in float32 only" in str(outcome.error)
