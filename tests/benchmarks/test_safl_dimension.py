"""The study of SAFL and dimensions: quadratics are what they say, and the command reports."""

import itertools
import json
from contextlib import suppress
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from benchmarks.lab.outcomes import Diverged
from benchmarks.lab.runs import Point
from benchmarks.studies.quadratics import SPECTRA, make_quadratic
from benchmarks.studies.safl_dimension.__main__ import app
from benchmarks.studies.safl_dimension.descent import descend
from benchmarks.studies.safl_dimension.methods import METHODS
from comm_hooks.compressors import CountSketch
from tests.benchmarks.studying import nothing

pytestmark = pytest.mark.filterwarnings("ignore:world size is 1")


@pytest.mark.parametrize("spectrum", SPECTRA)
def test_the_hessian_has_the_spectrum(spectrum: str) -> None:
    quadratic = make_quadratic(spectrum, 64, seed=3)
    hessian = torch.stack([quadratic.gradient(unit) for unit in torch.eye(64)])
    torch.testing.assert_close(hessian, hessian.T)
    found = torch.linalg.eigvalsh(hessian.double()).flip(0)
    expected = SPECTRA[spectrum](torch.arange(1.0, 65.0)).double()
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)
    x = torch.randn(64)
    assert quadratic.loss(x) == pytest.approx(float(x @ hessian @ x) / 2, rel=1e-4)
    assert quadratic.loss(quadratic.start) == pytest.approx(float(expected.sum()) / 2, rel=1e-4)
    assert quadratic.intrinsic_dimension == pytest.approx(float(expected.sum()), rel=1e-4)
    off_diagonal = hessian - torch.diag(hessian.diagonal())
    assert spectrum == "flat" or float(off_diagonal.abs().max()) > 0.01, "along coordinates"


def descent(spectrum: str, numel: int, size: int, lr: float, name: str = "safl") -> list[Point]:
    build = METHODS[name].fit(CountSketch(size / numel), numel, 400)
    quadratic = make_quadratic(spectrum, numel, 0)
    return descend(quadratic, build, lr, 0, limit=400, target=0.1, advance=nothing)


@pytest.mark.slow
def test_rounds_grow_with_the_intrinsic_dimension() -> None:
    flat, steep = (
        [min(descent(spectrum, n, 64, lr)[-1].loss for lr in rates) for n in (256, 4096)]
        for spectrum, rates in (("flat", (0.04, 0.08)), ("power law", (0.02, 0.04)))
    )
    assert flat[1] > 3 * flat[0]
    assert steep[1] < 3 * steep[0] < 1200


@pytest.mark.parametrize(
    "name", [pytest.param(m, marks=[pytest.mark.slow] * (m != "cd_adam")) for m in METHODS]
)
def test_every_method_arrives_with_messages_half_as_large(name: str) -> None:
    ends = []
    for lr in (0.01, 0.05, 0.25):
        with suppress(Diverged):
            ends.append(descent("power law", 256, 128, lr, name)[-1])
    assert any(end.error <= 0.1 and end.loss == end.round for end in ends), ends


@pytest.mark.slow
def test_what_diverges_and_what_does_not_arrive() -> None:
    with pytest.raises(Diverged):
        descent("flat", 256, 64, 1e3)
    end = descent("flat", 256, 64, 1e-6)[-1]
    assert end.round == 400
    assert end.loss == 400 * (1 + end.error) > 400


@pytest.mark.slow
def test_the_command_from_end_to_end(tmp_path: Path) -> None:
    small = ["--numels", "64,128", "--size", "32", "--limit", "60", "--tries", "2", "--seeds", "2"]
    small += ["--methods", "safl,marina"]
    result = CliRunner().invoke(app, [*small, "--out", str(tmp_path)])
    assert result.exit_code == 0, result.output
    methods = json.loads((tmp_path / "safl_dimension.json").read_text())["methods"]
    labels = [(m["labels"]["spectrum"], m["labels"]["parameters"], m["name"]) for m in methods]
    assert labels == list(itertools.product(SPECTRA, (64, 128), ("safl", "marina")))
    assert all(len(m["tries"]) == len(m["losses"]) == 2 for m in methods)
    assert "> 60" in result.stdout
