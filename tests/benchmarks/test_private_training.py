"""Private runs of the studies: what is drawn, what is added and what it costs."""

import os
from dataclasses import replace
from typing import Any

import pytest
import torch

from benchmarks.lab.runs import Point
from benchmarks.lab.training import new_model
from benchmarks.studies.private_training import (
    PrivatePlan,
    default_delta,
    loader_over,
    train_privately,
)
from comm_hooks.collectives import Simulated
from comm_hooks.optim.private import DPSGD
from comm_hooks.optim.private.accounting import GaussianEvent, build_accountant
from tests.benchmarks.studying import digits, nothing

PLAN = PrivatePlan(
    steps=6,
    batch=48,
    sample_rate=1 / 30,
    noise_multiplier=1.5,
    max_grad_norm=0.5,
    delta=3e-4,
    points=3,
)


@pytest.fixture
def known_secrets(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let all runs draw the same samples and the same noise."""
    monkeypatch.setattr(os, "urandom", bytes)


def trained(plan: PrivatePlan = PLAN, lr: float = 0.1, **options: Any) -> list[Point]:
    task = digits(1)
    model = new_model(task, 0, "cpu")
    optimizer = DPSGD(list(model.named_parameters()), lr)
    transport = Simulated(1)[0]
    return train_privately(task, model, optimizer, plan, nothing, transport=transport, **options)


def test_a_point_says_what_was_spent_until_there() -> None:
    curve = trained()
    assert [point.round for point in curve] == [2, 4, 6]
    accountant = build_accountant("rdp")
    for point in curve:
        event = GaussianEvent(1.5, 1 / 30, point.round)
        assert point.epsilon == accountant.epsilon([event], 3e-4)
        # Ranks and links are trusted.
        assert point.peer_epsilon is None
        assert point.bytes_sent == 0
    local = trained(placement="local")[-1]
    assert local.peer_epsilon == local.epsilon


def test_runs_draw_samples_and_noise_anew() -> None:
    first, second = trained(), trained()
    assert first[-1].loss != second[-1].loss


@pytest.mark.usefixtures("known_secrets")
def test_a_run_follows_from_its_plan_and_the_secrets() -> None:
    first = trained()
    assert trained() == first
    # Whose gradients are in memory at a time changes nothing but rounding.
    again = trained(replace(PLAN, micro_batch_size=7))
    assert [p.loss for p in again] == pytest.approx([p.loss for p in first], rel=1e-4)
    others = [
        trained(replace(PLAN, noise_multiplier=3.0)),
        trained(replace(PLAN, max_grad_norm=1.0)),
        trained(replace(PLAN, batch=96)),
        trained(replace(PLAN, sample_rate=1 / 20)),
        trained(lr=0.3),  # 0.2 would do what the doubled norm does: all samples are clipped
    ]
    losses = {run[-1].loss for run in [first, *others]}
    assert len(losses) == 6


def test_a_loader_fetches_what_the_shard_holds() -> None:
    samples = digits(3).clients[1]
    batches = list(loader_over(samples))
    assert len(batches) == len(samples)
    inputs, targets = zip(*batches, strict=True)
    assert torch.equal(torch.cat(inputs), samples.inputs[samples.indices])
    assert torch.equal(torch.cat(targets), samples.targets[samples.indices])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"noise_multiplier": 0.0}, "sigma must be positive, got 0"),
        ({"noise_multiplier": float("nan")}, "sigma must be positive, got nan"),
        ({"max_grad_norm": -1.0}, "--max-grad-norm must be positive, got -1"),
        ({"batch": 101, "sample_rate": 1.01}, "--batch: there are only 100 samples, got 101"),
        ({"delta": 0.01}, r"--delta must lie in \(0, 1/100\), .* got 0.01"),
        ({"delta": 0.0}, "--delta must lie in"),
    ],
)
def test_plans_that_are_not_private_are_refused(change: dict[str, Any], message: str) -> None:
    PLAN.check(100)
    with pytest.raises(ValueError, match=message):
        replace(PLAN, **change).check(100)


def test_the_default_delta_is_below_one_over_the_samples() -> None:
    assert default_delta(50_000) == 1e-5
