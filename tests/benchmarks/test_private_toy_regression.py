"""The toy regression of AdaDPS: the problem, the command, and what must come out."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from typer.testing import CliRunner

from benchmarks.lab.outcomes import Diverged, Method
from benchmarks.studies.private_toy_regression.__main__ import app
from benchmarks.studies.private_toy_regression.methods import Study, make_methods
from benchmarks.studies.private_toy_regression.problem import (
    ClippedRegression,
    draw,
    side_information,
)
from comm_hooks.optim.private.accounting import GaussianEvent, RDPAccountant
from tests.benchmarks.studying import nothing

FULL = Study(steps=2250, noise_multiplier=0.7, max_grad_norm=0.5, rates=[0.1], points=5)
SHORT = Study(20, 0.7, 0.5, [0.01], 2)


def method(name: str, study: Study = FULL) -> Method:
    return next(m for m in make_methods(study) if m.name == name)


def test_the_problem_is_the_paper_s() -> None:
    problem = draw(3)
    assert problem.inputs.shape == (1000, 500)
    assert bool(((problem.inputs == 0) | (problem.inputs == 1)).all())
    # 50,000 and 450,000 draws: standard deviations of 0.0013 and 0.00015.
    assert float(problem.inputs[:, :50].mean()) == pytest.approx(0.9, abs=0.007)
    assert float(problem.inputs[:, 50:].mean()) == pytest.approx(0.01, abs=0.0008)
    weight = torch.cat([torch.full((50,), 0.01), torch.ones(450)])
    # Half the variance of the noise, 0.01; the mean of 1,000 squares is off by 4.5 %.
    assert problem.loss(weight) == pytest.approx(0.005, rel=0.25)
    assert not torch.equal(draw(4).inputs, problem.inputs)


def test_how_rare_features_are_can_be_told() -> None:
    assert float(draw(3, rare=0.2).inputs[:, 50:].mean()) == pytest.approx(0.2, abs=0.003)
    assert float(side_information(0.2)[50:].unique()) == pytest.approx(0.2)


def test_larger_batches_have_less_noise_and_cost_more() -> None:
    assert replace(FULL, batch=32).noise_variance == pytest.approx(FULL.noise_variance / 16)
    result = CliRunner().invoke(app, ["--batch", "1001"])
    assert result.exit_code == 2
    assert "--batch: there are only 1000 samples, got 1001" in result.output


def test_gradients_are_those_of_the_loss() -> None:
    problem = draw(0)
    weight = nn.Parameter(torch.randn(500, generator=torch.Generator().manual_seed(0)))
    residual = problem.inputs @ weight - problem.labels
    loss = residual.square().mean() / 2
    loss.backward()
    assert problem.loss(weight) == pytest.approx(loss.item())
    ours = problem.gradients(weight, torch.arange(1000)).mean(0)
    assert weight.grad is not None
    torch.testing.assert_close(ours, weight.grad, rtol=1e-4, atol=1e-4)


def test_every_sample_is_clipped() -> None:
    problem, weight = draw(0), nn.Parameter(torch.zeros(500))
    gradients = ClippedRegression(problem, weight, 0.5)
    gradients.backward(torch.tensor([3]))
    assert float(gradients.take().tensors[0].norm()) == pytest.approx(0.5, rel=1e-3)
    gradients.backward(torch.tensor([], dtype=torch.long))
    assert not gradients.take().tensors[0].any()


@pytest.mark.parametrize("name", ["AdaDPS", "Adam"])
def test_a_run_can_be_repeated(name: str) -> None:
    short = method(name, SHORT)
    curves = [short.train({"lr": 0.01}, seed, nothing) for seed in (1, 1, 2)]
    assert curves[0] == curves[1] != curves[2]
    assert [point.round for point in curves[0]] == [10, 20]


def test_a_run_that_diverges_says_so() -> None:
    with pytest.raises(Diverged):
        method("DP-SGD", SHORT).train({"lr": 1e30}, 0, nothing)


SETTINGS: dict[str, tuple[dict[str, float], float, float]] = {
    "AdaDPS": ({"lr": 0.2}, 0.0, 1.6),
    "DP-SGD": ({"lr": 0.1}, 1.75, 2.6),
    "DP-Adam": ({"lr": 0.005}, 1.75, 2.6),
    "DP-AdamBC": ({"lr": 0.001, "gamma / Phi": 0.01}, 1.75, 2.6),
    "AdaS": ({"lr": 0.005}, 0.0, 0.007),
    "Adam": ({"lr": 0.01}, 0.007, 0.05),
    "SGD": ({"lr": 0.02}, 0.5, 1.2),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", SETTINGS)
def test_the_paper_s_order_on_a_seed_that_was_not_tuned_on(name: str) -> None:
    settings, least, most = SETTINGS[name]
    assert least < method(name).train(settings, 7, nothing)[-1].loss < most


@pytest.mark.slow
def test_the_command_writes_what_it_says(tmp_path: Path) -> None:
    options = ["--steps", "6", "--seeds", "2", "--rates", "0.01,0.1", "--points", "3"]
    result = CliRunner().invoke(app, [*options, "--out", str(tmp_path)])
    assert result.exit_code == 0, result.output
    assert (tmp_path / "curves.png").stat().st_size > 1000
    record: dict[str, Any] = json.loads((tmp_path / "private_toy_regression.json").read_text())
    assert record["complete"]
    methods = {m["name"]: m for m in record["methods"]}
    assert list(methods) == [
        *("AdaDPS", "DP-SGD", "DP-Adam", "DP-AdamBC", "DP-RMSProp", "A after the noise"),
        *("scale-then-privatize", "DP2", "AdaS", "SGD", "Adam"),
    ]
    for m in methods.values():
        assert len(m["tries"]) in (2, 6)
        assert len(m["curves"]) == 2
        assert [point["round"] for point in m["curves"][0]] == [2, 4, 6]
        assert m["name"] in result.output
    assert record["settings"]["delta"] == 0.001
    assert 0 < record["settings"]["epsilon"] < 1.5
    assert record["settings"]["batch"] == 8
    assert record["settings"]["rare"] == 0.01


def test_the_paper_s_epsilon() -> None:
    epsilon = RDPAccountant().epsilon([GaussianEvent(0.7, 8 / 1000, 2250)], 1e-3)
    assert round(epsilon, 2) == 4.13
