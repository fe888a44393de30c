"""The study of rates: what it measures, and how it reports."""

import json
import math
from pathlib import Path

import pytest
import torch
from torch import nn
from typer.testing import CliRunner

from benchmarks.lab.outcomes import Diverged
from benchmarks.lab.runs import Point
from benchmarks.studies.convergence.__main__ import app, exponent
from benchmarks.studies.convergence.descent import Build, Problem, squared_gradients
from benchmarks.studies.convergence.methods import (
    OneClient,
    Parameters,
    dp_micro_adam,
    fed_lamb,
    make_methods,
    make_safl,
)
from tests.benchmarks.studying import nothing

pytestmark = pytest.mark.filterwarnings("ignore:world size is 1")


def descend(parameters: Parameters, lr: float, seed: int) -> OneClient:
    return OneClient(torch.optim.SGD([p for _, p in parameters], lr))


def squared(
    problem: Problem, scale: float, steps: int, seed: int = 0, build: Build = descend
) -> Point:
    return squared_gradients(problem, build, scale=scale, steps=steps, seed=seed, advance=nothing)


def test_gradient_descent_on_equal_eigenvalues_does_what_theory_says() -> None:
    # |g_t|^2 = d (1 - lr)^2t without noise.
    found = squared(Problem("flat", 64, noise=1e-12), 1.0, 100)
    assert found.error == 1
    assert found.loss == pytest.approx(64 * sum(0.9 ** (2 * t) for t in range(100)) / 100, rel=1e-4)


def test_noise_costs_what_theory_says() -> None:
    # With steps of lr = 0.5, |g|^2 settles at d noise^2 lr / (2 - lr).
    found = squared(Problem("flat", 1024, noise=2.0), 0.5 * math.sqrt(400), 400, seed=1)
    settled = 1024 * 4 * 0.5 / 1.5
    assert settled / 1024 < found.error < 1.7
    assert found.loss == pytest.approx(settled + 1024 / 400 / 0.75, rel=0.02)


def test_an_exploding_gradient_is_divergence() -> None:
    with pytest.raises(Diverged):
        squared(Problem("flat", 64, noise=1.0), 100.0, 100)


@pytest.mark.slow
def test_more_clients_bring_less_noise() -> None:
    problem = Problem("power law", 256, noise=1.0)
    one, sixteen = (squared(problem, 0.3, 60, build=fed_lamb(n)).loss for n in (1, 16))
    assert sixteen < one / 2


def test_the_constant_is_tuned_on_the_middle_length() -> None:
    method = make_methods(Problem("flat", 64, noise=1.0), [5, 10, 20], [1], [1])[0]
    curve = method.train({"lr": 0.1}, 0, nothing)
    assert [point.round for point in curve] == [5, 10, 20]
    assert curve[-1].validation == curve[1].loss


def test_the_exponent() -> None:
    assert exponent([Point(100, 3.0, 1.0, 0), Point(400, 1.5, 1.0, 0)]) == pytest.approx(-0.5)


@pytest.mark.slow
def test_the_command_from_end_to_end(tmp_path: Path) -> None:
    small = [
        "--numel",
        "64",
        "--steps",
        "5,10",
        "--clients",
        "1,2",
        "--local-steps",
        "1,3",
        "--seeds",
        "2",
        "--tries",
        "2",
    ]
    result = CliRunner().invoke(app, [*small, "--out", str(tmp_path)])
    assert result.exit_code == 0, result.output
    methods = json.loads((tmp_path / "convergence.json").read_text())["methods"]
    assert [(m["name"], *m["labels"].values()) for m in methods] == [
        ("DP-MicroAdam", 1, 1),
        ("DP-MicroAdam, published", 1, 1),
        ("SAFL", 1, 1),
        ("SAFL", 1, 3),
        ("FED-LAMB", 1, 1),
        ("FED-LAMB", 2, 1),
    ]
    assert all(len(m["curves"]) == 2 for m in methods)


def test_methods_compress_what_they_are_given() -> None:
    parameters = [("weight", nn.Parameter(torch.ones(32, 2)))]
    micro_adam = dp_micro_adam()(parameters, 0.1, 0)
    parameters[0][1].grad = torch.randn(32, 2)
    micro_adam.step()
    assert int((parameters[0][1] != 1).sum()) == 1  # 1 % of 64, rounded up


def test_local_steps_follow_one_another_before_anything_is_exchanged() -> None:
    weight = nn.Parameter(torch.ones(32, 2))
    safl = make_safl(0.25, 3)([("weight", weight)], 0.3, 0)
    assert list(safl.clients()) == [0, 0, 0]
    seen = []
    for _ in safl.clients():
        weight.grad = torch.ones(32, 2)
        safl.step()
        seen.append(float(weight.detach()[0, 0]))
    assert seen[:2] == pytest.approx([0.9, 0.8])  # 0.3 over 3, each of them
    assert seen[2] != pytest.approx(0.7)  # the server's step, from where the round began
