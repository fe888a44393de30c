"""A method's plan has the bytes of its training, and its arithmetic takes time."""

import math
import re
from collections.abc import Sequence
from typing import Any

import pytest
import torch

from comm_hooks import Exchange, ExchangeSettings, Identity, Sign, TopK
from comm_hooks.collectives import Simulated
from comm_hooks.launchers.advise import methods
from comm_hooks.launchers.advise.cost_model import Plan, matrix_shapes
from comm_hooks.launchers.advise.echo import Echo
from comm_hooks.launchers.advise.methods import Planner, parse_method, parse_methods
from comm_hooks.optim.low_communication import plan_rounds
from comm_hooks.optim.registry import OPTIMIZERS

SHAPES = ((256, 128), (128, 256), (40,), (128, 64))
NUMEL = sum(map(math.prod, SHAPES))
CPU = torch.device("cpu")


def plan_of(spec: str, ranks: int = 2, shapes: Sequence[tuple[int, ...]] = SHAPES) -> Plan:
    (method,) = parse_methods(spec)
    return Planner(shapes, ranks, CPU).plan(method)


SPECS = ["topk", "sign:exempt_bits=16", "quantize:bits=2", "topk:collective=sharded", "perm_k"]


@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.parametrize("spec", [*SPECS, "count_sketch", "sign+local_variance_adam"])
def test_the_bytes_are_those_of_the_library(spec: str, ranks: int) -> None:
    exchange = Exchange(parse_method(spec).settings(), transport=Simulated(ranks)[0])
    nbytes = exchange.bytes_per_round({str(i): shape for i, shape in enumerate(SHAPES)})
    # Buckets are shares of one round; their bytes are rounded.
    assert plan_of(spec, ranks).traffic == pytest.approx(nbytes, abs=8)


@pytest.mark.parametrize("ranks", [2, 5])
def test_rounds_send_as_many_bits_as_they_were_planned_for(ranks: int) -> None:
    shapes = {str(i): shape for i, shape in enumerate(SHAPES)}
    planned = plan_rounds(shapes, Simulated(ranks)[0], 0.12)
    plan = plan_of("low_communication:bits=0.12", ranks)
    assert plan.steps % planned.local_steps == 0
    # Payloads in Rice code are as long as their gaps need; the plan has their bound.
    assert 0.5 * planned.bits < 8 * plan.traffic / NUMEL < 1.01 * planned.bits


@pytest.mark.parametrize("name", [n for n, e in OPTIMIZERS.items() if e.averages != "before"])
def test_every_optimizer_that_exchanges_has_a_plan(name: str) -> None:
    if name == "marina":
        with pytest.raises(ValueError, match="needs a closure"):
            plan_of(name)
        return
    plan = plan_of(name)
    assert plan.traffic > 0
    assert plan.optimizer
    assert plan.optimizer > 0
    assert not plan.hook_rounds


def test_arithmetic_is_measured_where_it_is_ours() -> None:
    assert plan_of("gaussian_sketch:ratio=0.05").codec > 1e-3
    assert plan_of("all_reduce").codec == plan_of("none").codec == 0


def test_buckets_of_large_models_overlap_and_sketches_wait_for_the_whole_gradient() -> None:
    shapes = matrix_shapes(9_000_000)
    for spec in ("all_reduce", "sign"):
        rounds = plan_of(spec, shapes=shapes).hook_rounds
        shares = [each.ready for each in rounds]
        assert len(shares) == 3
        assert 0 < shares[0] < shares[1] < shares[2] == 1
        parts = [each.traffic / sum(each.traffic for each in rounds) for each in rounds]
        assert parts == pytest.approx([shares[0], shares[1] - shares[0], 1 - shares[1]], rel=1e-3)
    (alone,) = plan_of("count_sketch", shapes=shapes).hook_rounds
    assert alone.ready == 1


@pytest.mark.parametrize("spec", ["all_reduce", "sign", "local_adamw"])
def test_a_part_of_a_large_model_is_measured(spec: str, monkeypatch: pytest.MonkeyPatch) -> None:
    shapes = matrix_shapes(1 << 21)
    whole = plan_of(spec, shapes=shapes)
    monkeypatch.setattr(methods, "_MOST_ELEMENTS", 1 << 19)
    assert plan_of(spec, shapes=shapes).traffic == pytest.approx(whole.traffic, rel=0.02)


@pytest.mark.filterwarnings("ignore:world size is 1")
@pytest.mark.parametrize("ranks", [1, 2, 5])
@pytest.mark.parametrize(
    ("compressor", "collective"),
    [
        (Identity(), "all_reduce"),
        (TopK(density=1.0, value_bits=32), "all_gather"),
        (Sign(), "sharded"),
    ],
)
def test_an_echo_repeats_the_payload_of_this_rank(
    ranks: int, compressor: Any, collective: Any
) -> None:
    echo = Echo(ranks, CPU)
    exchange = Exchange(compressor, collective=collective, transport=echo)
    # Equal shards, so that the echo of one is right for all.
    gradient = torch.full((ranks, 2048), 3.0)
    tensors = {"weight": gradient.clone()}
    exchange.average_(tensors)
    assert torch.allclose(tensors["weight"], gradient)
    assert echo.stop().traffic == exchange.stats()["bytes_sent"]


def test_methods_are_read_as_they_are_written() -> None:
    method = parse_method("topk:density=1/64:memory=none+local_variance_adam:beta1=0.8")
    assert method.parts == (
        "topk",
        {"density": 1 / 64, "memory": None},
        "local_variance_adam",
        {"beta1": 0.8},
    )
    assert parse_method("sign:min_numel=1e+3").options == {"min_numel": 1000.0}
    assert parse_method("LocalVarianceAdam").parts == parse_method("local_variance_adam").parts
    settings = ExchangeSettings.from_dict(OPTIMIZERS["one_bit_adam"].published or {})
    assert parse_method("one_bit_adam").settings().as_dict() == settings.as_dict()


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("sign+sign+adam", "at most one optimizer"),
        ("sign:bits", "options are written sign:option=value"),
        ("all_reduce+local_variance_adam", "needs a compressor before the '+'"),
        ("sign+low_communication", "low_communication takes no compressor"),
        ("sign+amsgrad", "amsgrad takes gradients averaged by a hook"),
        ("local_variance_adam:beta3=0.5", "unknown option of local_variance_adam"),
        ("topk,topk:density=1/64,topk:density=0.015625", "is named twice"),
    ],
)
def test_a_bad_method_is_refused(spec: str, message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        parse_methods(spec)
