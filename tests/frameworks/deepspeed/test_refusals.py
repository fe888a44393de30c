"""What a user may get wrong is said in one line, on all ranks, before training starts."""

import base64
import copy
import json
import warnings
from argparse import Namespace
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from comm_hooks import ConfigMismatchError, Exchange, Sign
from comm_hooks.optim import LocalVarianceAdam
from tests.frameworks.deepspeed.common import (
    HIDDEN,
    TOPK,
    config,
    digest,
    engine_of,
    import_deepspeed,
    net,
    train,
)
from tests.ranks import Outcome, Ranks, RanksOf

pytest.importorskip("deepspeed", reason="needs DeepSpeed: pip install deepspeed")


ZERO = "zero_optimization"
FEATURES: dict[str, tuple[dict[str, Any], str]] = {
    "stage 3": ({"stage": 3}, "zero_optimization.stage 3"),
    "not contiguous": (
        {"stage": 1, ZERO: {"contiguous_gradients": False}},
        "zero_optimization.contiguous_gradients false",
    ),
    "prescaled": ({"prescale_gradients": True}, "prescale_gradients"),
    "predivided": ({"gradient_predivide_factor": 2.0}, "gradient_predivide_factor"),
    "sums": ({"gradient_allreduce_op": "sum"}, 'gradient_allreduce_op "sum"'),
    "DeepCompile": ({"stage": 1, "compile": {"deepcompile": True}}, "compile.deepcompile"),
    "autocast": (
        {"torch_autocast": {"enabled": True, "dtype": "float16"}},
        "torch_autocast with float16",
    ),
    "Muon": (
        {"stage": 1, "optimizer": {"type": "Muon", "params": {"lr": 0.01, "torch_adam": True}}},
        "optimizer.type Muon with ZeRO",
    ),
}
NEW = ("sums", "autocast", "Muon")
BLOCKS: dict[str, tuple[dict[str, Any], str]] = {
    "nothing": ({}, "comm_hooks.compressor: missing"),
    "unknown setting": (
        {**TOPK, "densty": 0.1},
        "comm_hooks.densty: unknown setting with topk 'densty': did you mean 'density'?",
    ),
    "changes": ({**TOPK, "memory": "differences"}, "comm_hooks.memory: Differences()"),
}


def make(settings: dict[str, Any]) -> None:
    import_deepspeed()
    from comm_hooks.frameworks.deepspeed import initialize

    initialize(model=net(), config=settings)


def refused(cases: dict[str, dict[str, Any]]) -> dict[str, str]:
    """Return the message of the ValueError for each configuration."""
    messages = {}
    for name, settings in cases.items():
        try:
            make(settings)
        except ValueError as error:
            messages[name] = str(error)
    return messages


def refusals(outcomes: list[Outcome]) -> set[str]:
    assert all(isinstance(o.error, ValueError) for o in outcomes), [o.trace for o in outcomes]
    return {str(outcome.error) for outcome in outcomes}


def test_features_and_blocks_that_cannot_work(ranks_of: RanksOf) -> None:
    is_old = version("deepspeed") < "0.19"
    features = {k: v for k, v in FEATURES.items() if not (is_old and k in NEW)}
    cases = {name: config(block=TOPK, **more) for name, (more, _) in features.items()}
    cases |= {name: {**config(), "comm_hooks": block} for name, (block, _) in BLOCKS.items()}
    expected = {k: f"comm_hooks cannot be used with {text}" for k, (_, text) in features.items()}
    expected |= {name: text for name, (_, text) in BLOCKS.items()}
    for messages in ranks_of(2).run(refused, cases):
        assert messages.keys() == expected.keys()
        for name, message in messages.items():
            assert message.startswith(expected[name])
            assert "\n" not in message


def mixture_of_experts() -> None:
    deepspeed = import_deepspeed()
    from deepspeed.moe.layer import MoE

    from comm_hooks.frameworks.deepspeed import initialize

    deepspeed.init_distributed("gloo")
    model = nn.Sequential(MoE(HIDDEN, nn.Linear(HIDDEN, HIDDEN), num_experts=2, ep_size=2))
    initialize(model=model, config=config(0, TOPK))


def pipeline_of_two_stages() -> None:
    deepspeed = import_deepspeed()
    from comm_hooks.frameworks.deepspeed import initialize

    deepspeed.init_distributed("gloo")
    layers = [nn.Linear(8, 8) for _ in range(4)]
    model = deepspeed.pipe.PipelineModule(layers, num_stages=2, loss_fn=nn.functional.mse_loss)
    initialize(model=model, config=config(0, TOPK))


def test_models_that_are_not_whole_on_every_rank() -> None:
    # In processes of their own: DeepSpeed keeps the groups of such models for all that follow.
    ranks = Ranks(2)
    try:
        for job, message in (
            (mixture_of_experts, "mixture-of-experts"),
            (pipeline_of_two_stages, "a pipeline of several stages"),
        ):
            (text,) = refusals(ranks.outcomes(job))
            assert text.startswith(f"comm_hooks cannot be used with {message}")
    finally:
        ranks.close()


def differing(settings: list[dict[str, Any]]) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        make(settings[dist.get_rank()])


@pytest.mark.parametrize(
    ("other", "message"),
    [
        (config(0), "comm_hooks is 'present' on rank 0, 'absent' on rank 1"),
        (config(0, {**TOPK, "density": 0.2}), "density is 0.1 on rank 0, 0.2 on rank 1"),
    ],
)
def test_ranks_with_different_blocks(
    ranks_of: RanksOf, other: dict[str, Any], message: str
) -> None:
    for outcome in ranks_of(2).outcomes(differing, [config(0, TOPK), other]):
        assert isinstance(outcome.error, ConfigMismatchError), outcome.trace
        assert message in str(outcome.error)


def warned(settings: dict[str, Any]) -> list[str]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        make(settings)
    return [str(warning.message) for warning in caught if "comm_hooks" in str(warning.message)]


def warned_with_own(settings: dict[str, Any]) -> list[str]:
    """Pass an optimizer that exchanges."""
    import_deepspeed()
    from comm_hooks.frameworks.deepspeed import initialize

    model = net()
    own = LocalVarianceAdam(model.named_parameters(), Exchange(Sign()))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        initialize(model=model, config=settings, optimizer=own)
    return [str(warning.message) for warning in caught if "comm_hooks" in str(warning.message)]


def test_what_is_skipped_is_said(ranks_of: RanksOf) -> None:
    for texts in ranks_of(2).run(warned, config(0)):
        assert len(texts) == 1
        assert "no 'comm_hooks' block: gradients are exchanged uncompressed" in texts[0]
    sketch = {"compressor": "count_sketch", "ratio": 0.1}
    settings = config(0, sketch, communication_data_type="bf16")
    for texts in ranks_of(2).run(warned, settings):
        assert len(texts) == 1
        assert texts[0].startswith("communication_data_type is ignored")
    without_optimizer = {k: v for k, v in config(0, TOPK).items() if k != "optimizer"}
    for texts in ranks_of(2).run(warned, without_optimizer):
        assert len(texts) == 1
        assert "has no optimizer" in texts[0]
    for texts in ranks_of(2).run(warned, config(0, TOPK)):
        assert len(texts) == 1
        assert "TopK in front of " in texts[0]
    assert ranks_of(2).run(warned, config(0, sketch)) == [[], []]
    without_type = {k: v for k, v in config(0).items() if k != "optimizer"}
    assert ranks_of(2).run(warned_with_own, without_type) == [[], []]


def required() -> str:
    from comm_hooks.frameworks.deepspeed import require

    engine = engine_of(config(0, TOPK))
    assert require(engine) is engine.comm_hooks
    require(engine_of(config(0)))
    return "not refused"


def test_require(ranks_of: RanksOf) -> None:
    (text,) = refusals(ranks_of(2).outcomes(required))
    assert text.startswith("DeepSpeedEngine exchanges gradients uncompressed")


def every_way_to_pass_a_configuration(path: str) -> list[str]:
    import_deepspeed()
    from comm_hooks.frameworks.deepspeed import initialize

    settings = config(0, TOPK)
    encoded = base64.urlsafe_b64encode(json.dumps(settings).encode()).decode()
    command_line = Namespace(deepspeed_config=path, local_rank=dist.get_rank())
    parameters: Any = None
    digests = []
    for arguments in (
        {"config": copy.deepcopy(settings)},
        {"config": path},
        {"config": encoded},
        {"config_params": settings},
        {"args": command_line},
    ):
        model = net()
        parameters = list(model.parameters())
        engine, optimizer, loader, scheduler = initialize(
            model=model, model_parameters=parameters, **arguments
        )
        assert optimizer is engine.optimizer
        assert loader is None
        assert scheduler is None
        train(engine, 2)
        assert engine.comm_hooks.stats()["compression_ratio"] > 3
        digests.append(digest(engine))
    engine = initialize(command_line, net())[0]  # by position
    train(engine, 2)
    assert command_line.deepspeed_config == path
    digests.append(digest(engine))
    # DeepSpeed must not read the file again, whose optimizer is not its own.
    command_line.deepspeed_config = f"{path}.ours"
    engine = initialize(command_line, net())[0]
    assert type(engine.optimizer).__name__ == "AMSGrad"
    assert command_line.deepspeed_config == f"{path}.ours"
    return digests


def test_a_configuration_may_be_passed_in_every_way(ranks_of: RanksOf, tmp_path: Path) -> None:
    path = tmp_path / "ds.json"
    # DeepSpeed reads Hjson: comments are allowed.
    path.write_text("# our run\n" + json.dumps(config(0, TOPK), indent=2))
    ours = config(0, TOPK, optimizer={"type": "AMSGrad", "params": {"lr": 0.01}})
    (tmp_path / "ds.json.ours").write_text(json.dumps(ours))
    for digests in ranks_of(2).run(every_way_to_pass_a_configuration, str(path)):
        assert len(digests) == 6
        assert len(set(digests)) == 1


def test_bfloat16_gradients_count_as_two_bytes(ranks_of: RanksOf) -> None:
    for report in ranks_of(2).run(_bytes):
        elements = sum(p.numel() for p in net().parameters())
        assert report["bytes_uncompressed"] == elements * torch.bfloat16.itemsize
        assert report["steps"] == 1


def _bytes() -> dict[str, float]:
    engine = engine_of(config(1, TOPK, dtype="bf16"))
    train(engine, 1)
    return engine.comm_hooks.stats()
