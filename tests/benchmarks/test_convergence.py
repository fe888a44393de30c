"""The study of rates: what it measures, and how it reports."""

import json
import math
from pathlib import Path

import pytest
import torch
from torch import nn
from typer.testing import CliRunner

from benchmarks.studies.convergence.__main__ import Row, app, make_rows_table
from benchmarks.studies.convergence.descent import Problem, squared_gradients
from benchmarks.studies.convergence.methods import OneClient, Parameters, make_methods

pytestmark = pytest.mark.filterwarnings("ignore:world size is 1")


def descend(parameters: Parameters, lr: float, seed: int) -> OneClient:
    return OneClient(torch.optim.SGD([p for _, p in parameters], lr))


def test_gradient_descent_on_equal_eigenvalues_does_what_theory_says() -> None:
    # |g_t|^2 = d (1 - lr)^2t without noise.
    problem = Problem("flat", 64, noise=1e-12)
    found = squared_gradients(problem, descend, scale=1.0, steps=100, seed=0)
    assert found.largest == 1
    assert found.mean == pytest.approx(64 * sum(0.9 ** (2 * t) for t in range(100)) / 100, rel=1e-4)


def test_noise_costs_what_theory_says() -> None:
    # With steps of lr = 0.5, |g|^2 settles at d noise^2 lr / (2 - lr).
    problem = Problem("flat", 1024, noise=2.0)
    found = squared_gradients(problem, descend, scale=0.5 * math.sqrt(400), steps=400, seed=1)
    settled = 1024 * 4 * 0.5 / 1.5
    assert settled / 1024 < found.largest < 1.7
    assert found.mean == pytest.approx(settled + 1024 / 400 / 0.75, rel=0.02)


def test_what_diverges_is_infinite() -> None:
    problem = Problem("flat", 64, noise=1.0)
    assert squared_gradients(problem, descend, scale=100.0, steps=100, seed=0).mean == math.inf


def test_more_clients_bring_less_noise() -> None:
    problem = Problem("power law", 256, noise=1.0)
    one, sixteen = (
        squared_gradients(problem, method.build, scale=0.3, steps=60, seed=0).mean
        for method in make_methods([1, 16], [1])
        if method.name == "FED-LAMB"
    )
    assert sixteen < one / 2


def test_the_slope_and_the_edge() -> None:
    tries = {0.1: 2.0, 0.2: 1.0, 0.4: None}
    row = Row(
        "m", 1, 1, 0.2, tries, (100, 400), [[1.0, 3.0], [0.5, 1.5]], [[1.0, 1.5], [2.0, 1.25]]
    )
    assert row.exponent == pytest.approx(-0.5)
    assert not row.is_at_an_edge
    lost = Row(
        "m", 4, 2, 0.1, tries, (100, 400), [[1.0, 3.0], [0.5, None]], [[1.0, 1.0], [1.0, None]]
    )
    assert lost.exponent is None
    cells = [list(column.cells) for column in make_rows_table([row, lost]).columns]
    assert [str(cell[1]) for cell in cells[2:]] == ["2", "0.1*", "2.0000", "-", "-", "-"]
    assert str(cells[-1][0]) == "2.00"


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
    rows = json.loads((tmp_path / "convergence.json").read_text())["rows"]
    assert [(row["method"], row["clients"], row["local_steps"]) for row in rows] == [
        ("DP-MicroAdam", 1, 1),
        ("DP-MicroAdam, published", 1, 1),
        ("SAFL", 1, 1),
        ("SAFL", 1, 3),
        ("FED-LAMB", 1, 1),
        ("FED-LAMB", 2, 1),
    ]
    assert all(len(own) == 2 for row in rows for own in row["squared"])


def test_methods_compress_what_they_are_given() -> None:
    parameters = [("weight", nn.Parameter(torch.ones(32, 2)))]
    micro_adam = make_methods([1], [1])[0].build(parameters, 0.1, 0)
    parameters[0][1].grad = torch.randn(32, 2)
    micro_adam.step()
    assert int((parameters[0][1] != 1).sum()) == 1  # 1 % of 64, rounded up


def test_local_steps_follow_one_another_before_anything_is_exchanged() -> None:
    (method,) = (m for m in make_methods([1], [3]) if m.name == "SAFL")
    weight = nn.Parameter(torch.ones(32, 2))
    safl = method.build([("weight", weight)], 0.3, 0)
    assert list(safl.clients()) == [0, 0, 0]
    seen = []
    for _ in safl.clients():
        weight.grad = torch.ones(32, 2)
        safl.step()
        seen.append(float(weight.detach()[0, 0]))
    assert seen[:2] == pytest.approx([0.9, 0.8])  # 0.3 over 3, each of them
    assert seen[2] != pytest.approx(0.7)  # the server's step, from where the round began
