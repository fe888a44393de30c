"""Settings of a DeepSpeed configuration: read, completed, or refused before anything is sent."""

import re
import warnings
from typing import Any

import pytest
import torch
from torch import nn

pytest.importorskip("deepspeed")

from comm_hooks import ErrorFeedback, Exchange, ExchangeSettings, Quantize, Sign, TopK
from comm_hooks.frameworks.deepspeed.settings import (
    EngineSettings,
    find_block,
    named_groups,
)
from comm_hooks.optim import OneBitAdam
from comm_hooks.optim.registry import OPTIMIZERS


def read(name: Any, params: Any = None, optimizer: Any = None, **more: Any) -> EngineSettings:
    block = {"type": name, **({} if params is None else {"params": params})}
    return EngineSettings.read({"optimizer": block, **more}, optimizer)


def made(name: str, params: Any = None, **more: Any) -> Any:
    """Return the optimizer of a layer, or raise as the construction of an engine does."""
    make, model = read(name, params, **more).make_optimizer, nn.Linear(40, 40)
    return make and make(named_groups(model.parameters(), model))


SKETCH = {"comm_hooks": {"compressor": "count_sketch", "ratio": 0.1}}
SIGNS = {"comm_hooks": {"compressor": "sign"}}
ROUNDS = {"comm_hooks": {"method": "low_communication"}}
BAD: list[tuple[str, str, Any, dict[str, Any]]] = [
    ("optimizer.params.freeze_stp: .*did you mean 'freeze_step'", "OneBitAdam",
     {"freeze_stp": 4}, {"zero_optimization": {"stage": 2}}),
    ("optimizer.params.cuda_aware: unknown option of cd_adam", "CDAdam",
     {"cuda_aware": False}, {}),
    ("optimizer.params.freeze_step: .*must be an integer, got 'auto'",
     "OneBitAdam", {"freeze_step": "auto"}, {}),
    ("optimizer.params: OneBitAdam: freeze_step must be an integer of at least 1, got 0",
     "OneBitAdam", {"freeze_step": 0}, {}),
    ("optimizer.params.betas: .*must be two numbers", "OneBitAdam", {"betas": "auto"}, {}),
    ("optimizer.params.amsgrad: not supported: .*CDAdam", "OneBitAdam", {"amsgrad": True}, {}),
    ("optimizer.params.density: missing", "FetchSGD", {"lr": 0.1}, {}),
    ("optimizer.params: must be an object", "OneBitAdam", [1], {}),
    ("optimizer.type: Marina cannot be used: .*two points", "Marina", {}, {}),
    ('optimizer.type: DiLoCo cannot be used: .*"method": "diloco"', "DiLoCo", {}, {}),
    ("optimizer.type: low_communication takes the place of AdamW", "OneBitAdam", {}, ROUNDS),
    ("optimizer.params.freeze_step: unknown setting", "AdamW", {"freeze_step": 4}, ROUNDS),
    ("optimizer.params.adam_w_mode: must be true", "AdamW", {"adam_w_mode": False}, ROUNDS),
    ("comm_hooks.method: unknown method 'low_comm': did you mean 'low_communication'", "AdamW", {},
     {"comm_hooks": {"method": "low_comm"}}),
    ("comm_hooks.bits_per_paramter: .*did you mean 'bits_per_parameter'", "AdamW", {},
     {"comm_hooks": {"method": "low_communication", "bits_per_paramter": 1.0}}),
    ("zero_optimization.stage: low_communication .*ZeRO stage 1 divides", "AdamW", {},
     {**ROUNDS, "zero_optimization": True}),
    ("zero_optimization.stage: must be 0 to 3, got 'two'", "AdamW", {},
     {**ROUNDS, "zero_optimization": {"stage": "two"}}),
    ("bf16.enabled: low_communication keeps a copy of the model", "AdamW", {},
     {**ROUNDS, "bf16": {"enabled": True}}),
    ("comm_hooks or optimizer.params: low_communication: total_steps must be an integer", "AdamW",
     {}, {"comm_hooks": {**ROUNDS["comm_hooks"], "total_steps": "auto"}}),
    ("comm_hooks or optimizer.params: low_communication: inner must be one of", "AdamW",
     {}, {"comm_hooks": {**ROUNDS["comm_hooks"], "inner": "sgd"}}),
    ("optimizer.type: unknown optimizer 'OneBitAdm': did you mean 'OneBitAdam'", "OneBitAdm",
     {}, {}),
    ("zero_optimization.stage: OneBit.*, or AdamW with a comm_hooks block", "OneBitLamb", {},
     {"zero_optimization": {"stage": 1}}),
    ("zero_optimization.stage: OneBitAdam needs whole gradients", "OneBitAdam", {},
     {"zero_optimization": {"stage": 2}}),
    ("gradient_allreduce_op: EF21 takes the mean", "EF21", {}, {"gradient_allreduce_op": "sum"}),
    ("compile.deepcompile: ", "EF21", {}, {"compile": {"deepcompile": True}}),
    ("comm_hooks.compresor: .*did you mean 'compressor'", "OneBitAdam", {},
     {"comm_hooks": {"compresor": "topk"}}),
    ("comm_hooks: must be an object", "OneBitAdam", {}, {"comm_hooks": "topk"}),
    (r"optimizer.params or comm_hooks: CDAdam: the exchange's memory must be Differences\(\)",
     "CDAdam", {}, {"comm_hooks": {"compressor": "topk", "memory": "error_feedback"}}),
    ("comm_hooks: missing; CommHooksAdamW is for gradients that an exchange", "CommHooksAdamW", {},
     {}),
    ("optimizer.type: SAFL cannot be used: it takes local steps", "SAFL", {}, SKETCH),
    ("optimizer.params: Invalid learning rate", "CommHooksAdamW", {"lr": -1}, SIGNS),
]  # fmt: skip


@pytest.mark.parametrize(("message", "name", "params", "more"), BAD)
def test_refused(message: str, name: str, params: Any, more: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="^" + message) as caught:
        made(name, params, **more)
    assert "\n" not in str(caught.value)


def test_a_misspelt_key_beside_params() -> None:
    with pytest.raises(ValueError, match=r"optimizer\.parms: .*did you mean 'params'"):
        EngineSettings.read({"optimizer": {"type": "OneBitAdam", "parms": {}}})


def test_a_misspelt_block_is_found() -> None:
    for name in ("comm_hook", "commhooks", "comm-hooks", "CommHooks"):
        with pytest.raises(ValueError, match=f"^{name}: .*did you mean 'comm_hooks'"):
            find_block({"optimizer": {}, name: {}})
    others = {"comms_logger": {}, "communication_data_type": "fp32", "compile": {}}
    assert find_block(others) is None


def test_names_of_others_are_left_to_deepspeed() -> None:
    for name in ("Adam", "AdamW", "SGD", "Lion", "Lamb", "Adagrad", "Quux"):
        assert read(name, {"x": 1}, zero_optimization={"stage": 3}) == EngineSettings()
    assert EngineSettings.read({}) == EngineSettings()


def test_an_optimizer_that_was_passed_decides() -> None:
    own = torch.optim.SGD(nn.Linear(2, 2).parameters(), lr=0.1)
    with pytest.warns(UserWarning, match=r"optimizer\.type: OneBitAdam is not used"):
        assert read("OneBitAdam", optimizer=own) == EngineSettings()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert read("Adam", optimizer=own, **SIGNS).exchange is not None
    exchanging: Any = OneBitAdam(
        nn.Linear(2, 2).parameters(), Exchange(Sign(), ErrorFeedback()), freeze_step=3
    )
    assert EngineSettings.read({}, exchanging) == EngineSettings()
    for config, message in [
        ({"zero_optimization": {"stage": 2}}, r"zero_optimization\.stage: OneBitAdam"),
        (SIGNS, "comm_hooks: the OneBitAdam that was passed"),
    ]:
        with pytest.raises(ValueError, match=message):
            EngineSettings.read(config, exchanging)


NAMES = [e.type_name for e in OPTIMIZERS.values() if not e.works_in_rounds]
NAMES = ["CommHooksAdamW", *(n for n in NAMES if n not in ("Adam", "AdamW", "Marina"))]


@pytest.mark.parametrize("name", NAMES)
def test_the_engine_averages_gradients_or_the_optimizer_exchanges(name: str) -> None:
    needed = {"DGC", "FetchSGD", "CocktailSGD"}
    params: dict[str, Any] = {"lr": 0.1, "density": 0.1}
    params = {"lr": 0.1} if name in ("DGC", "CocktailSGD") else params
    servers = ("AMSGrad", "CommHooksAdamW", "LaProp", "MuonAdamW")
    more = SKETCH if name in servers else {"comm_hooks": {"min_numel": 64}}
    found = read(name.lower(), params if name in needed else None, **more)
    assert (found.exchange is not None) == (name in servers)
    assert found.make_optimizer is not None


def test_exact_first_steps_are_a_number() -> None:
    for value in (-1, 2.5, "auto", True):
        block = {"compressor": "count_sketch", "start_compression_step": value}
        with pytest.raises(ValueError, match=r"^comm_hooks: start_compression_step must"):
            read("AdamW", comm_hooks=block)


def test_every_setting_of_an_exchange_can_be_written() -> None:
    block = {
        "compressor": "topk",
        "density": 0.01,
        "memory": {"type": "error_feedback", "bits": 4},
        "downlink": {"type": "quantize", "bits": 4},
        "verify_every": 8,
        "start_compression_step": 5,
    }
    found = read("AdamW", comm_hooks=block)
    assert found.exchange is not None
    assert found.exchange.compressor == TopK(density=0.01)
    assert found.exchange.downlink == Quantize(bits=4)
    assert (found.exchange.verify_every, found.start_compression_step) == (8, 5)
    assert str(found.exchange.memory) == "ErrorFeedback(bits=4)"


def test_defaults_of_deepspeed() -> None:
    optimizer = made("onebitadam")
    assert isinstance(optimizer, OneBitAdam)
    assert optimizer.freeze_step == 100_000
    optimizer = made("ZeroOneAdam")
    schedule = ("var_freeze_step", "var_update_scaler", "local_step_scaler", "local_step_clipper")
    assert [getattr(optimizer, s) for s in schedule] == [100_000, 16, 32_678, 16]
    for key, value in {"lr": 1e-3, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0}.items():
        assert optimizer.param_groups[0][key] == value
    assert made("AMSGrad", {"bias_correction": True}).param_groups[0]["bias_correction"]


def test_groups_of_deepspeeds_one_bit_adam() -> None:
    model = nn.Linear(40, 40)
    weight, bias = nn.Linear(40, 40).parameters()
    with pytest.warns(UserWarning, match="parameter group 1: exp_avg_mask is not needed"):
        groups = named_groups(
            [{"params": [weight]}, {"params": bias, "exp_avg_mask": torch.ones(40), "lr": 0.5}],
            model,
        )
    assert groups == [
        {"params": [("parameter.0", weight)]},
        {"params": [("parameter.1", bias)], "lr": 0.5},
    ]
    with pytest.raises(ValueError, match="parameter group 0: non_freeze is not supported"):
        named_groups([{"params": [weight], "non_freeze": True}], model)


def test_names_and_frozen_parameters() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    model[0].weight.requires_grad_(False)
    groups = [{"params": iter(model.parameters())}, {"params": model[0].weight}]
    (group,) = named_groups(groups, model)
    assert [name for name, _ in group["params"]] == ["0.bias", "1.weight", "1.bias"]


PUBLISHED = OneBitAdam.published
DENSITY = {"compressor": "topk", "density": 0.05}


@pytest.mark.parametrize(
    ("name", "block", "meant"),
    [
        ("CDAdam", DENSITY, {**DENSITY, "memory": "differences"}),
        ("OneBitAdam", DENSITY, DENSITY),
        ("OneBitAdam", {"min_numel": 4096}, {**PUBLISHED, "min_numel": 4096}),
        ("DGC", DENSITY, {**DENSITY, "memory": "momentum_correction"}),
    ],
)
def test_the_block_is_the_exchange(name: str, block: dict[str, Any], meant: dict[str, Any]) -> None:
    params = {"lr": 0.1} if name == "DGC" else {}
    found = made(name, params, comm_hooks=block).exchange.settings.as_dict()
    assert found == ExchangeSettings.from_dict(meant).as_dict()


def test_one_warning_for_what_decides_nothing() -> None:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        read("ZeroOneAdam", {"cuda_aware": False, "comm_backend_name": "mpi"})
    assert [re.sub(" of .*", "", str(w.message)) for w in caught] == [
        "optimizer.params: cuda_aware, comm_backend_name"
    ]
