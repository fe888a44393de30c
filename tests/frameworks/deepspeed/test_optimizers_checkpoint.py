"""Interrupted runs of optimizers named in the JSON, and checkpoints that must be refused."""

import shutil
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

pytest.importorskip("deepspeed")

from comm_hooks import Exchange, PayloadError
from tests.frameworks.deepspeed.optimizer_runs import (
    PARAMS,
    minibatches,
    new_engine,
    settings,
    train,
    values,
)
from tests.frameworks.selection import by_default
from tests.ranks import Ranks, RanksOf

SCHEDULER = {"type": "WarmupLR", "params": {"warmup_num_steps": 8, "warmup_max_lr": 2e-3}}
BF16 = {"bf16": {"enabled": True}}


def state_of(engine: Any) -> list[torch.Tensor]:
    """Return everything that the next step depends on."""
    optimizer = engine.basic_optimizer
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    states = [optimizer.state.get(p, {}) for p in parameters]
    tensors = [t for state in states for _, t in sorted(state.items())]
    memory = engine.comm_hooks.exchange.state_dict().get("memory", {})
    residuals = [t for _, t in sorted(memory.items()) if torch.is_tensor(t)]
    copies = [t.detach().clone() for t in (*parameters, *tensors, *residuals)]
    return values(engine.module) + copies


def resumed(name: str, more: dict[str, Any], folder: str, at: int) -> tuple[bool, bool, bool]:
    """Train 10 steps, and 10 with a save after ``at`` of them and a load into a new engine."""
    config = settings(name, PARAMS.get(name), scheduler=SCHEDULER, **more)
    steps = minibatches()
    straight = new_engine(config)
    train(straight, steps)
    first = new_engine(config)
    train(first, steps[:at])
    first.save_checkpoint(folder)
    second = new_engine(config)
    second.load_checkpoint(folder)
    came_back = all(map(torch.equal, state_of(first), state_of(second)))
    train(second, steps[at:])
    expected, got = state_of(straight), state_of(second)
    same_rates = straight.get_lr() == second.get_lr()
    return came_back, len(expected) == len(got) and all(map(torch.equal, expected, got)), same_rates


@pytest.mark.parametrize(
    ("name", "more", "at"),
    by_default(
        [
            ("LocalVarianceAdam", BF16, 5),
            ("ZeroOneAdam", {}, 7),  # between synchronizations: replicas differ
        ],
        [
            ("OneBitAdam", {}, 6),
            ("OneBitAdam", BF16, 6),
            ("LocalVarianceAdam", {}, 5),
            ("ZeroOneAdam", BF16, 7),
            ("CDAdam", {}, 5),
            ("MicroAdam", {}, 5),
            ("DGC", {}, 5),
            ("FetchSGD", {}, 5),
        ],
    ),
)
def test_resumes_bit_for_bit(
    ranks_of: RanksOf, tmp_path: Path, name: str, more: dict[str, Any], at: int
) -> None:
    results = ranks_of(2).run(resumed, name, more, str(tmp_path), at)
    assert results == [(True, True, True)] * 2


def save(name: str, folder: str, steps: int) -> Any:
    engine = new_engine(settings(name, PARAMS.get(name)))
    train(engine, minibatches(steps))
    engine.save_checkpoint(folder, tag="now")
    return state_of(engine), engine.comm_hooks.exchange.step


def load(name: str, folder: str) -> Any:
    engine = new_engine(settings(name, PARAMS.get(name)))
    engine.load_checkpoint(folder, tag="now")
    train(engine, minibatches(1))
    states = [engine.basic_optimizer.state[p] for p in engine.module.parameters()]
    return states, values(engine.module)


def second_moments(name: str, folder: str) -> list[torch.Tensor]:
    engine = new_engine(settings(name, PARAMS.get(name)))
    engine.load_checkpoint(folder, tag="now")
    return [engine.basic_optimizer.state[p]["exp_avg_sq"] for p in engine.module.parameters()]


def test_on_another_number_of_ranks_own_second_moments_start_from_their_mean(
    ranks_of: RanksOf, tmp_path: Path
) -> None:
    name, folder = "LocalVarianceAdam", str(tmp_path)
    ranks_of(2).run(save, name, folder, 6)
    first, second = ranks_of(2).run(second_moments, name, folder)
    assert not torch.equal(first[0], second[0])
    for loaded in ranks_of(3).run(second_moments, name, folder):
        for a, b, mean in zip(first, second, loaded, strict=True):
            torch.testing.assert_close(mean, (a + b) / 2)
    models = [model for _, model in ranks_of(3).run(load, name, folder)]
    assert all(all(map(torch.equal, model, models[0])) for model in models)


def refused(ranks: Ranks, name: str, folder: Path) -> str:
    """Return what all ranks say alike when they load."""
    messages = set()
    for outcome in ranks.outcomes(load, name, str(folder)):
        assert isinstance(outcome.error, ValueError), outcome.trace
        messages.add(str(outcome.error))
    assert len(messages) == 1
    return messages.pop()


def test_unsynchronized_on_another_number_of_ranks(ranks_of: RanksOf, tmp_path: Path) -> None:
    (first, _), (second, _) = ranks_of(2).run(save, "ZeroOneAdam", str(tmp_path), 7)
    assert not torch.equal(first[0], second[0])
    assert "between synchronizations" in refused(ranks_of(3), "ZeroOneAdam", tmp_path)


def load_where_gradients_are_exchanged(folder: str) -> None:
    config = settings("CommHooksAdamW", {"lr": 1e-3})
    config["comm_hooks"] = {"compressor": "quantize", "bits": 4, "memory": "error_feedback"}
    new_engine(config).load_checkpoint(folder)


def weights_only(folder: str) -> list[torch.Tensor]:
    engine = new_engine(settings("OneBitAdam", PARAMS["OneBitAdam"]))
    engine.load_checkpoint(folder, tag="now", load_module_only=True)
    return values(engine.module)


def test_another_optimizer_gets_the_model_alone(ranks_of: RanksOf, tmp_path: Path) -> None:
    (saved, _), _ = ranks_of(2).run(save, "OneBitAdam", str(tmp_path), 6)
    for loaded in ranks_of(2).run(weights_only, str(tmp_path)):
        assert all(map(torch.equal, loaded, saved[: len(loaded)]))
    assert "saved by OneBitAdam" in refused(ranks_of(2), "LocalVarianceAdam", tmp_path)
    for outcome in ranks_of(2).outcomes(load_where_gradients_are_exchanged, str(tmp_path)):
        assert "the residuals saved by OneBitAdam do not fit the exchange of gra" in str(
            outcome.error
        )


def of_deepspeed(folder: Path) -> None:
    """Write a checkpoint as DeepSpeed 0.19.6 wrote that of its own OneBitAdam, in float32."""
    shutil.rmtree(folder / "now" / "comm_hooks")
    (path,) = folder.glob("now/*model_states.pt")
    content = torch.load(path, weights_only=False)
    for state in content["optimizer"]["state"].values():
        count = state["exp_avg"].numel()
        state["step"] = int(state["step"])
        state.update(tensor_size=count, corrected_tensor_size=count, server_chunk_size=count // 2)
        state.update(worker_error=torch.ones(count), server_error=torch.ones(count // 2))
    for group in content["optimizer"]["param_groups"]:
        group.pop("param_names", None)
        group.update(bias_correction=True, max_grad_norm=0.0)
    torch.save(content, path)


def go_on_from_deepspeed(folder: str) -> tuple[list[torch.Tensor], list[torch.Tensor], int]:
    engine = new_engine(settings("OneBitAdam", PARAMS["OneBitAdam"]))
    with pytest.warns(UserWarning, match="saved by DeepSpeed's own: moments and steps go on"):
        engine.load_checkpoint(folder, tag="now")
    states = [engine.optimizer.state[p] for p in engine.module.parameters()]
    moments = [state[key].clone() for state in states for key in ("exp_avg", "exp_avg_sq")]
    assert all(len(state) == 3 for state in states)
    train(engine, minibatches(2))
    return moments, values(engine.module), int(states[0]["step"])


def moments_of(folder: str) -> list[torch.Tensor]:
    engine = new_engine(settings("OneBitAdam", PARAMS["OneBitAdam"]))
    engine.load_checkpoint(folder, tag="now")
    states = [engine.optimizer.state[p] for p in engine.module.parameters()]
    return [state[key].clone() for state in states for key in ("exp_avg", "exp_avg_sq")]


def test_a_checkpoint_of_deepspeeds_own_goes_on(ranks_of: RanksOf, tmp_path: Path) -> None:
    ranks_of(2).run(save, "OneBitAdam", str(tmp_path), 6)
    expected = ranks_of(2).run(moments_of, str(tmp_path))[0]
    of_deepspeed(tmp_path)
    (moments, first, steps), (_, second, _) = ranks_of(2).run(go_on_from_deepspeed, str(tmp_path))
    assert all(map(torch.equal, moments, expected))
    assert all(map(torch.equal, first, second))
    assert steps == 8


def diverged(folder: str) -> None:
    """Save from replicas that are not the same any more, which nothing here can bring about."""
    engine = new_engine(settings("OneBitAdam", PARAMS["OneBitAdam"]))
    train(engine, minibatches(6))
    with torch.no_grad():
        next(engine.module.parameters()).add_(dist.get_rank())
    with pytest.raises(PayloadError, match="the parameters of rank 1 are not those of rank 0"):
        engine.save_checkpoint(f"{folder}/refused", tag="now")
    with mock.patch.object(Exchange, "compare_replicas"):
        engine.save_checkpoint(folder, tag="now")


def test_replicas_that_had_diverged(ranks_of: RanksOf, tmp_path: Path) -> None:
    ranks_of(2).run(diverged, str(tmp_path))
    message = refused(ranks_of(2), "OneBitAdam", tmp_path)
    assert "the model and the optimizer are not those that rank 1 had when it saved" in message
    assert "rank 0" not in message
    assert "not those that rank 1 had" in refused(ranks_of(3), "OneBitAdam", tmp_path)
