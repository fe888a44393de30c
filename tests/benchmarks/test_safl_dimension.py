"""The study of SAFL and dimensions: quadratics are what they say, and the command reports."""

import json
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from benchmarks.studies.quadratics import SPECTRA, make_quadratic
from benchmarks.studies.safl_dimension.__main__ import Row, app, make_rows_table
from benchmarks.studies.safl_dimension.descent import Descent, descend
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


def rounds(spectrum: str, numel: int, lr: float) -> int:
    descent = descend(
        make_quadratic(spectrum, numel, 0),
        METHODS["safl"].fit(CountSketch(ratio=64 / numel), numel, 400),
        lr,
        0,
        limit=400,
        target=0.1,
        advance=nothing,
    )
    assert descent.rounds is not None
    return descent.rounds


@pytest.mark.slow
def test_rounds_grow_with_the_intrinsic_dimension() -> None:
    # With sketches of 64 numbers of 256 and of 4,096 parameters.
    flat = [min(rounds("flat", n, lr) for lr in (0.04, 0.08)) for n in (256, 4096)]
    steep = [min(rounds("power law", n, lr) for lr in (0.02, 0.04)) for n in (256, 4096)]
    assert flat[1] > 3 * flat[0]
    assert steep[1] < 3 * steep[0]


@pytest.mark.parametrize(
    "name", [pytest.param(m, marks=[pytest.mark.slow] * (m != "cd_adam")) for m in METHODS]
)
def test_every_method_arrives_with_messages_half_as_large(name: str) -> None:
    build = METHODS[name].fit(CountSketch(ratio=0.5), 256, 400)
    for lr in (0.01, 0.05, 0.25):
        descent = descend(
            make_quadratic("power law", 256, 0),
            build,
            lr,
            0,
            limit=400,
            target=0.1,
            advance=nothing,
        )
        if descent.rounds is not None:
            return
    pytest.fail(f"{name}: {descent}")


def test_what_diverges_and_what_does_not_arrive() -> None:
    quadratic = make_quadratic("flat", 256, 0)
    for lr, limit in ((1e3, 50), (1e-6, 5)):
        safl = METHODS["safl"].fit(CountSketch(ratio=0.25), 256, limit)
        descent = descend(quadratic, safl, lr, 0, limit=limit, target=0.1, advance=nothing)
        assert descent.rounds is None
        assert (descent.left is None) == (lr > 1)
        assert descent.cost(limit) > limit


def test_the_table_marks_edges_and_what_did_not_arrive() -> None:
    tries = (Descent(0.1, 0, 7, 0.1), Descent(0.2, 0, None, 0.5))
    row = Row("safl", "flat", 1024, 1024.0, tries, (tries[0], Descent(0.1, 1, None, 0.3)))
    assert row.is_at_an_edge
    assert row.mean is None
    cells = [next(iter(column.cells)) for column in make_rows_table([row], 100).columns]
    assert [str(cell) for cell in cells[4:]] == ["-", "7, > 100", "0.1*"]


def test_the_command_from_end_to_end(tmp_path: Path) -> None:
    small = ["--numels", "64,128", "--size", "32", "--limit", "60", "--tries", "2", "--seeds", "2"]
    small += ["--methods", "safl,marina"]
    result = CliRunner().invoke(app, [*small, "--out", str(tmp_path)])
    assert result.exit_code == 0, result.output
    record = json.loads((tmp_path / "safl_dimension.json").read_text())
    assert [(row["method"], row["spectrum"], row["numel"]) for row in record["rows"]] == [
        (method, spectrum, numel)
        for method in ("safl", "marina")
        for spectrum in SPECTRA
        for numel in (64, 128)
    ]
    assert all(len(row["tries"]) == len(row["runs"]) == 2 for row in record["rows"])
