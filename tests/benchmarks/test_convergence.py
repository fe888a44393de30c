"""The study of rates: what it measures, and how it reports."""

import json
import math
from pathlib import Path

import pytest
import torch
from torch import nn
from typer.testing import CliRunner

from benchmarks.studies.convergence.__main__ import Row, app, make_rows_table
from benchmarks.studies.convergence.descent import Problem, mean_squared_gradient
from benchmarks.studies.convergence.methods import OneClient, Parameters, make_methods

pytestmark = pytest.mark.filterwarnings("ignore:world size is 1")


def descend(parameters: Parameters, lr: float, seed: int) -> OneClient:
    return OneClient(torch.optim.SGD([p for _, p in parameters], lr))


def test_gradient_descent_on_equal_eigenvalues_does_what_theory_says() -> None:
    # |g_t|^2 = d (1 - lr)^2t without noise.
    problem = Problem("flat", 64, noise=1e-12)
    found = mean_squared_gradient(problem, descend, scale=1.0, steps=100, seed=0)
    assert found == pytest.approx(64 * sum(0.9 ** (2 * t) for t in range(100)) / 100, rel=1e-4)


def test_noise_costs_what_theory_says() -> None:
    # With steps of lr = 0.5, |g|^2 settles at d noise^2 lr / (2 - lr).
    problem = Problem("flat", 1024, noise=2.0)
    found = mean_squared_gradient(problem, descend, scale=0.5 * math.sqrt(400), steps=400, seed=1)
    settled = 1024 * 4 * 0.5 / 1.5
    assert found == pytest.approx(settled + 1024 / 400 / 0.75, rel=0.02)


def test_what_diverges_is_infinite() -> None:
    problem = Problem("flat", 64, noise=1.0)
    assert mean_squared_gradient(problem, descend, scale=100.0, steps=100, seed=0) == math.inf


def test_more_clients_bring_less_noise() -> None:
    problem = Problem("power law", 256, noise=1.0)
    one, sixteen = (
        mean_squared_gradient(problem, method.build, scale=0.3, steps=60, seed=0)
        for method in make_methods([1, 16])
        if method.name == "FED-LAMB"
    )
    assert sixteen < one / 2


def test_the_slope_and_the_edge() -> None:
    tries = {0.1: 2.0, 0.2: 1.0, 0.4: None}
    row = Row("m", 1, 0.2, tries, (100, 400), [[1.0, 3.0], [0.5, 1.5]])
    assert row.exponent == pytest.approx(-0.5)
    assert not row.is_at_an_edge
    lost = Row("m", 1, 0.1, tries, (100, 400), [[1.0, 3.0], [0.5, None]])
    assert lost.exponent is None
    cells = [list(column.cells) for column in make_rows_table([row, lost]).columns]
    assert [str(cell[1]) for cell in cells[2:]] == ["0.1*", "2.0000", "-", "-"]


def test_the_command_from_end_to_end(tmp_path: Path) -> None:
    small = ["--numel", "64", "--steps", "5,10", "--clients", "1,2", "--seeds", "2", "--tries", "2"]
    result = CliRunner().invoke(app, [*small, "--out", str(tmp_path)])
    assert result.exit_code == 0, result.output
    rows = json.loads((tmp_path / "convergence.json").read_text())["rows"]
    assert [(row["method"], row["clients"]) for row in rows] == [
        ("DP-MicroAdam", 1),
        ("DP-MicroAdam, published", 1),
        ("SAFL", 1),
        ("FED-LAMB", 1),
        ("FED-LAMB", 2),
    ]
    assert all(len(own) == 2 for row in rows for own in row["squared"])
    assert (tmp_path / "gradient-vs-steps.png").read_bytes().startswith(b"\x89PNG")


def test_methods_compress_what_they_are_given() -> None:
    parameters = [("weight", nn.Parameter(torch.ones(32, 2)))]
    micro_adam = make_methods([1])[0].build(parameters, 0.1, 0)
    parameters[0][1].grad = torch.randn(32, 2)
    micro_adam.step()
    assert int((parameters[0][1] != 1).sum()) == 1  # 1 % of 64, rounded up


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--numel", "1000"], "--numel must be a power of 2, got 1000"),
        (["--numel", "16"], "--numel must be at least 32, got 16"),
        (["--spectrum", "falling"], "--spectrum: unknown name 'falling'"),
        (["--noise", "0"], "--noise"),
    ],
)
def test_bad_options(arguments: list[str], message: str) -> None:
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 2
    assert message in result.output
