"""The recommended method, and the figures behind it."""

from dataclasses import replace

import pytest
import torch

from comm_hooks.launchers.advise.command import METHODS
from comm_hooks.launchers.advise.cost_model import Link, Network
from comm_hooks.launchers.advise.methods import Planner, parse_method, parse_methods
from comm_hooks.launchers.advise.quality import ALL, Cell, Kept
from comm_hooks.launchers.advise.recommend import Case, Row, choose, make_row
from comm_hooks.launchers.advise.step import Step

STEP = Step.of_numel(1 << 18, 10.0)
CASE = Case(STEP, Network(2, Link(12.5e6, 1e-4)), optimizer=0.001)
NCCL = replace(CASE.network, backend="nccl")


def row(spec: str, seconds: float, *kept: float) -> Row:
    tasks = {f"task {i}": share for i, share in enumerate(kept)}
    cells = [Cell(spec, 2, 2.0, 6, 1, 0.0, tasks)]
    share = ALL if spec == "all_reduce" else Kept(cells) if kept else None
    return Row(parse_method(spec), seconds, 0.0, 0.0, share)


def choice(*rows: Row, min_share: float = 0.9) -> str | None:
    chosen = choose(rows, min_share)
    return chosen.method.spec if chosen else None


def test_the_fastest_of_those_that_keep_enough_on_every_task() -> None:
    plain, bf16 = row("all_reduce", 2.0), row("bf16", 1.0, 1.0, 0.99)
    fast = row("powersgd", 0.5, 1.0, 0.8, 1.0)
    assert choice(plain, bf16, fast) == "bf16"
    assert choice(plain, bf16, fast, min_share=0.75) == "powersgd"
    assert choice(plain, row("low_communication", 0.5, 1.0)) == "low_communication"
    assert choice(plain) == "all_reduce"
    assert choice(fast) is None


def test_nothing_is_changed_for_a_few_percent() -> None:
    assert choice(row("bf16", 1.0, 1.0), row("all_reduce", 1.04)) == "all_reduce"
    assert choice(row("bf16", 1.0, 1.0), row("all_reduce", 1.06)) == "bf16"


def test_a_method_without_measurement_or_exchange_is_not_recommended() -> None:
    assert choice(row("sign", 0.1), row("none", 0.1, 1.0), min_share=0.01) is None


def test_zero_keeps_its_all_gather() -> None:
    """Half-size gradients or none at all: a third of the bytes stays."""
    planner = Planner(STEP, 2, torch.device("cpu"))
    plans = [(method, planner.plan(method)) for method in parse_methods("all_reduce,topk,none")]
    for stage in (1, 2):
        case = replace(CASE, zero_stage=stage)
        plain, topk, none = (make_row(case, method, plan) for method, plan in plans)
        assert none.traffic == STEP.numel / 2 * 4
        assert plain.traffic == 3 * none.traffic
        assert none.traffic < topk.traffic < 1.1 * none.traffic
        assert 1 < plain.seconds / none.seconds < 3
    plain, _, none = (make_row(CASE, method, plan) for method, plan in plans)
    assert (plain.traffic, none.traffic) == (STEP.numel * 4, 0)
    # Without exchange a step takes the time that was given, however long AdamW took.
    assert none.seconds == pytest.approx(0.01)
    assert make_row(replace(CASE, optimizer=1.0), *plans[2]).seconds == pytest.approx(0.01)


def test_zero_refuses_optimizers_that_exchange() -> None:
    at_0, at_1 = (replace(CASE, network=NCCL, zero_stage=stage) for stage in (0, 1))
    for method in parse_methods(METHODS):
        at_0.check(method)
        if method.optimizer:
            with pytest.raises(ValueError, match="ZeRO stage 1 divides the optimizer's state"):
                at_1.check(method)
        else:
            at_1.check(method)


def test_bf16_of_pytorch_is_for_nccl() -> None:
    method = parse_method("bf16")
    with pytest.raises(ValueError, match="on gloo identity:bits=16 sends as many bytes"):
        CASE.check(method)
    replace(CASE, network=NCCL).check(method)
    replace(CASE, zero_stage=1).check(method)  # DeepSpeed's own, without a hook
