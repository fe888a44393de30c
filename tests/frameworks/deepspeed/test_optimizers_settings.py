"""What the ``optimizer`` block may say: refused or warned about before anything is sent."""

import re
import warnings
from typing import Any

import pytest
import torch
from torch import nn

pytest.importorskip("deepspeed")

from comm_hooks import ErrorFeedback, Exchange, Sign, TopK
from comm_hooks.frameworks.deepspeed.optimizers import TYPES, averaging, prepare
from comm_hooks.optim import AMSGrad, FrozenVarianceAdam, OneBitAdam


def prepared(name: Any, params: Any = None, optimizer: Any = None, **more: Any) -> Any:
    block = {"type": name, **({} if params is None else {"params": params})}
    config = {"optimizer": block, **more}
    return prepare(config, model=nn.Linear(40, 40), optimizer=optimizer, model_parameters=None)


ROUNDS = {"comm_hooks": {"method": "low_communication"}}
BAD: list[tuple[str, str, Any, dict[str, Any]]] = [
    ("optimizer.params.freeze_stp: .*did you mean 'freeze_step'", "OneBitAdam",
     {"freeze_stp": 4}, {}),
    ("optimizer.params.wieght_decay: .*did you mean 'weight_decay'", "SAFL",
     {"wieght_decay": 4}, {}),
    ("optimizer.params.cuda_aware: unknown parameter of CDAdam", "CDAdam",
     {"cuda_aware": False}, {}),
    ("optimizer.params: OneBitAdam: freeze_step must be an integer of at least 1, got 'auto'",
     "OneBitAdam", {"freeze_step": "auto"}, {}),
    ("optimizer.params: OneBitAdam: lr must not be negative", "OneBitAdam", {"lr": -1.0}, {}),
    ("optimizer.params.betas: must be two numbers, got 'auto'", "OneBitAdam",
     {"betas": "auto"}, {}),
    ("optimizer.params.betas: must be two numbers", "CDAdam", {"betas": [0.9]}, {}),
    ("optimizer.params.amsgrad: not supported: .*CDAdam", "OneBitAdam", {"amsgrad": True}, {}),
    ("optimizer.params.max_grad_norm: not supported: use gradient_clipping", "ZeroOneAdam",
     {"max_grad_norm": 1.0}, {}),
    ("optimizer.params.freeze_step: missing; CompressedAdam has no default",
     "CompressedAdam", {}, {}),
    ("optimizer.params.lr: missing", "DGC", {}, {}),
    ("optimizer.params.density: missing", "FetchSGD", {"lr": 0.1}, {}),
    ("optimizer.params: must be an object", "OneBitAdam", [1], {}),
    ("optimizer.params: OneBitLamb: coeff_beta must lie in", "onebitlamb", {"coeff_beta": 2}, {}),
    ("optimizer.type: Marina cannot be used: .*two points", "Marina", {}, {}),
    ('optimizer.type: DiLoCo cannot be used: .*"method": "low_communication"', "DiLoCo", {}, {}),
    ("optimizer.type: LocalAdamW cannot be used: .*comm_hooks.optim.LocalRounds", "LocalAdamW",
     {}, {}),
    ("optimizer.type: low_communication takes the place of AdamW", "OneBitAdam", {}, ROUNDS),
    ("optimizer.params.freeze_step: unknown parameter", "AdamW", {"freeze_step": 4}, ROUNDS),
    ("optimizer.params.adam_w_mode: .* as AdamW does", "AdamW", {"adam_w_mode": False}, ROUNDS),
    ("comm_hooks.method: unknown method 'low_comm': did you mean 'low_communication'", "AdamW", {},
     {"comm_hooks": {"method": "low_comm"}}),
    ("comm_hooks.bits_per_paramter: .*did you mean 'bits_per_parameter'", "AdamW", {},
     {"comm_hooks": {"method": "low_communication", "bits_per_paramter": 1.0}}),
    (r"comm_hooks.method: unknown method \"\['low_communication'\]\"", "AdamW", {},
     {"comm_hooks": {"method": ["low_communication"]}}),
    ("optimizer.params: must be an object", "AdamW", [1], ROUNDS),
    ("optimizer.params.betas: must be two numbers, got 0.9", "AdamW", {"betas": 0.9}, ROUNDS),
    ("optimizer.params.lr: must be a number, got '1e-3'", "AdamW", {"lr": "1e-3"}, ROUNDS),
    ("zero_optimization.stage: low_communication .*ZeRO stage 1 divides", "AdamW", {},
     {**ROUNDS, "zero_optimization": True}),
    ("zero_optimization.stage: must be 0 to 3, got 'two'", "AdamW", {},
     {**ROUNDS, "zero_optimization": {"stage": "two"}}),
    ("zero_optimization.stage: low_communication .*ZeRO stage 2 divides", "AdamW", {},
     {**ROUNDS, "zero_optimization": {"stage": 2}}),
    ("bf16.enabled: low_communication keeps a model of its own", "AdamW", {},
     {**ROUNDS, "bf16": {"enabled": True}}),
    ("optimizer.type: unknown optimizer 'OneBitAdm': did you mean 'OneBitAdam'", "OneBitAdm",
     {}, {}),
    ("zero_optimization.stage: OneBitAdam .*ZeRO stage 3 divides", "OneBitAdam", {},
     {"zero_optimization": {"stage": 3}}),
    ("zero_optimization.stage: OneBitLamb .*stages 1 and 2 OneBitAdam works", "OneBitLamb", {},
     {"zero_optimization": {"stage": 1}}),
    ("optimizer.params: FrozenVarianceAdam: freeze_step must be", "OneBitAdam",
     {"freeze_step": 0}, {"zero_optimization": {"stage": 1}}),
    ("optimizer.params.freeze_stp: .*did you mean 'freeze_step'", "OneBitAdam",
     {"freeze_stp": 4}, {"zero_optimization": {"stage": 2}}),
    ("zero_optimization.stage: DeMo .*ZeRO stage 3 divides", "DeMo", {},
     {"zero_optimization": {"stage": 3}}),
    ("gradient_allreduce_op: EF21 takes the mean", "EF21", {}, {"gradient_allreduce_op": "sum"}),
    ("compile.deepcompile: ", "EF21", {}, {"compile": {"deepcompile": True}}),
    ("comm_hooks.compresor: .*did you mean 'compressor'", "OneBitAdam", {},
     {"comm_hooks": {"compresor": "topk"}}),
    ("comm_hooks: must be an object", "OneBitAdam", {}, {"comm_hooks": "topk"}),
    (r"comm_hooks: CDAdam: the exchange's memory must be Differences\(\)", "CDAdam", {},
     {"comm_hooks": {"compressor": "topk", "memory": "error_feedback"}}),
    ("comm_hooks: MicroAdam: its window holds the blocks of TopK", "MicroAdam", {},
     {"comm_hooks": {"compressor": "sign"}}),
    ("comm_hooks: missing; SAFL is for gradients that an exchange averages", "SAFL", {}, {}),
    ("comm_hooks: missing; CommHooksAdamW is for", "CommHooksAdamW", {}, {}),
    ("optimizer.params.lr: must be a number, got 'auto'", "CommHooksAdamW",
     {"lr": "auto"}, {"comm_hooks": {"compressor": "sign"}}),
    ("optimizer.params: Invalid learning rate", "CommHooksAdamW", {"lr": -1},
     {"comm_hooks": {"compressor": "sign"}}),
    ("comm_hooks.compressor: SAFL needs a sketch .* got topk", "SAFL", {},
     {"comm_hooks": {"compressor": "topk"}}),
    ("optimizer.params: SAFL: local_steps must be 1, got 4: more are rounds", "SAFL",
     {"local_steps": 4}, {"comm_hooks": {"compressor": "srht"}}),
    ("optimizer.params: SAFL: local_lr must be positive", "SAFL", {"local_lr": 0}, {}),
    ("optimizer.params: SAFL: amsgrad must be true or false", "SAFL", {"amsgrad": "no"}, {}),
]  # fmt: skip


@pytest.mark.parametrize(("message", "name", "params", "more"), BAD)
def test_refused(message: str, name: str, params: Any, more: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="^" + message) as caught:
        prepared(name, params, **more)
    assert "\n" not in str(caught.value)


def test_a_misspelt_key_beside_params() -> None:
    config = {"optimizer": {"type": "OneBitAdam", "parms": {}}}
    with pytest.raises(ValueError, match=r"optimizer\.parms: .*did you mean 'params'"):
        prepare(config, model=nn.Linear(2, 2), optimizer=None, model_parameters=None)


@pytest.mark.parametrize("name", ["Adam", "AdamW", "SGD", "Lion", "Lamb", "Adagrad", "Quux"])
def test_names_of_others_are_left_to_deepspeed(name: str) -> None:
    assert prepared(name, {"anything": 1}, zero_optimization={"stage": 3}) is None
    config: dict[str, Any] = {"optimizer": {"type": name}}
    assert averaging(config, None, None) is None


def test_no_optimizer_block() -> None:
    assert prepare({}, model=nn.Linear(2, 2), optimizer=None, model_parameters=None) is None


def test_an_optimizer_that_was_passed_decides() -> None:
    model = nn.Linear(2, 2)
    own = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.warns(UserWarning, match=r"optimizer\.type: OneBitAdam is not used"):
        assert prepared("OneBitAdam", optimizer=own) is own
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert prepared("Adam", optimizer=own) is own


def test_an_exchanging_optimizer_that_was_passed() -> None:
    own = OneBitAdam(nn.Linear(2, 2).parameters(), Exchange(Sign(), ErrorFeedback()), freeze_step=3)
    for config, message in [
        ({"zero_optimization": {"stage": 2}}, r"zero_optimization\.stage: OneBitAdam"),
        ({"comm_hooks": {"compressor": "topk"}}, "comm_hooks: the OneBitAdam that was passed"),
    ]:
        with pytest.raises(ValueError, match=message):
            prepare(config, model=nn.Linear(2, 2), optimizer=own, model_parameters=None)
    assert averaging({}, {}, own) is None


@pytest.mark.parametrize("name", TYPES)
def test_who_owns_the_exchange(name: str) -> None:
    config = {"optimizer": {"type": name.lower()}}
    found = averaging(config, {"compressor": "srht", "ratio": 0.1}, None)
    servers = ("SAFL", "AMSGrad", "CommHooksAdamW", "FrozenVarianceAdam")
    assert (found is not None) == (name in servers)


@pytest.mark.parametrize("stage", [1, 2])
def test_one_bit_adam_in_parts(stage: int) -> None:
    zero = {"zero_optimization": {"stage": stage}}
    params = {"lr": 0.1, "betas": [0.8, 0.9], "freeze_step": 7, "cuda_aware": False}
    optimizer = prepared("OneBitAdam", params, **zero)(list(nn.Linear(40, 40).parameters()))
    assert isinstance(optimizer, FrozenVarianceAdam)
    assert optimizer.param_groups[0]["freeze_step"] == 7
    assert optimizer.param_groups[0]["betas"] == (0.8, 0.9)

    config = {"optimizer": {"type": "onebitadam", "params": params}, **zero}
    found = averaging(config, None, None)
    assert found is not None
    assert found.start_compression_step == 7
    assert found.settings.compressor == Sign(block_size=None, scale="rms")
    assert found.settings.collective == "sharded"
    found = averaging(config, {"exempt_bits": 16}, None)
    assert found is not None
    assert found.settings.exempt_bits == 16
    assert isinstance(found.settings.compressor, Sign)
    found = averaging(config, {"compressor": "topk"}, None)
    assert found is not None
    assert isinstance(found.settings.compressor, TopK)
    with pytest.raises(ValueError, match=r"^comm_hooks.start_compression_step: OneBitAdam starts"):
        averaging(config, {"start_compression_step": 3}, None)
    found = averaging({"optimizer": {"type": "OneBitAdam"}, **zero}, None, None)
    assert found is not None
    assert found.start_compression_step == 100_000


@pytest.mark.parametrize("value", [-1, 2.5, "auto", True])
def test_exact_first_steps_are_a_number(value: Any) -> None:
    block = {"compressor": "count_sketch", "start_compression_step": value}
    with pytest.raises(ValueError, match=r"^comm_hooks: start_compression_step must"):
        averaging({"optimizer": {"type": "AdamW"}}, block, None)


def test_defaults_of_deepspeed() -> None:
    model = nn.Linear(40, 40)
    optimizer = prepared("OneBitAdam")(list(model.parameters()))
    assert optimizer.freeze_step == 100_000
    optimizer = prepared("ZeroOneAdam")(list(model.parameters()))
    schedule = ("var_freeze_step", "var_update_scaler", "local_step_scaler", "local_step_clipper")
    assert [getattr(optimizer, s) for s in schedule] == [100_000, 16, 32_678, 16]
    for key, value in {"lr": 1e-3, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0}.items():
        assert optimizer.param_groups[0][key] == value


def test_a_type_is_its_class() -> None:
    optimizer = prepared("onebitadam")(list(nn.Linear(40, 40).parameters()))
    assert isinstance(optimizer, OneBitAdam)
    assert type(optimizer).__name__ == "OneBitAdam"
    optimizer = prepared("amsgrad", {"bias_correction": True})(list(nn.Linear(4, 4).parameters()))
    assert isinstance(optimizer, AMSGrad)
    assert optimizer.param_groups[0]["bias_correction"]


@pytest.mark.parametrize("amsgrad", [True, False])
def test_the_server_of_safl(amsgrad: bool) -> None:
    model = nn.Linear(4, 4)
    sketch = {"compressor": "count_sketch", "ratio": 0.1}
    params = {"amsgrad": amsgrad, "eps": 1e-6, "local_lr": 0.5}
    optimizer = prepared("SAFL", params, comm_hooks=sketch)(list(model.parameters()))
    model(torch.ones(1, 4)).sum().backward()
    optimizer.step()
    assert ("max_exp_avg_sq" in optimizer.state[model.weight]) == amsgrad
    assert optimizer.param_groups[0]["eps"] == 2e-6


def test_zero_is_a_stage() -> None:
    for zero in ({"stage": 0}, {}, None):
        assert callable(prepared("OneBitAdam", zero_optimization=zero))
    sketch = {"compressor": "count_sketch", "ratio": 0.1}
    assert callable(prepared("SAFL", zero_optimization={"stage": 2}, comm_hooks=sketch))


def test_groups_of_deepspeeds_one_bit_adam() -> None:
    weight, bias = nn.Linear(40, 40).parameters()
    make = prepared("OneBitAdam")
    with pytest.warns(UserWarning, match="parameter group 1: exp_avg_mask is not needed"):
        optimizer = make(
            [{"params": [weight]}, {"params": [bias], "exp_avg_mask": torch.ones(40), "lr": 0.5}]
        )
    assert "exp_avg_mask" not in optimizer.param_groups[1]
    assert optimizer.param_groups[1]["lr"] == 0.5
    names = [group["param_names"] for group in optimizer.param_groups]
    assert names == [["parameter.0"], ["parameter.1"]]
    with pytest.raises(ValueError, match="parameter group 0: non_freeze is not supported"):
        make([{"params": [weight], "non_freeze": True}])


def test_names_and_frozen_parameters() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    model[0].weight.requires_grad_(False)
    make = prepare(
        {"optimizer": {"type": "OneBitAdam"}},
        model=model,
        optimizer=None,
        model_parameters=None,
    )
    groups = make([{"params": iter(model.parameters())}, {"params": model[0].weight}]).param_groups
    assert [group["param_names"] for group in groups] == [["0.bias", "1.weight", "1.bias"]]


def test_one_warning_for_what_decides_nothing() -> None:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        prepared("ZeroOneAdam", {"cuda_aware": False, "comm_backend_name": "mpi"})
    assert [re.sub(" of .*", "", str(w.message)) for w in caught] == [
        "optimizer.params: cuda_aware, comm_backend_name"
    ]


def test_the_engine_must_be_attached_before_steps_count() -> None:
    model = nn.Linear(40, 40)
    optimizer = prepared("DeMo", {"weight_decay": 0.5, "lr": 0.1})(list(model.parameters()))
    before = model.weight.detach().clone()
    model(torch.ones(1, 40)).sum().backward()
    optimizer.step()
    assert torch.equal(model.weight, before)
    assert optimizer.exchange.step == 0
