"""The study of Hessians: the estimate is that of the matrix itself, and the command reports."""

import json
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from benchmarks.lab.model import Block
from benchmarks.studies.safl_spectrum.__main__ import app
from benchmarks.studies.safl_spectrum.lanczos import Spectrum, hessian_product, spectrum


def with_eigenvalues(values: torch.Tensor) -> torch.Tensor:
    generator = torch.Generator().manual_seed(0)
    basis, _ = torch.linalg.qr(torch.randn(len(values), len(values), generator=generator))
    return basis @ torch.diag(values) @ basis.T


@pytest.mark.parametrize("decay", [0.5, 1.5])
def test_sums_and_ends_are_those_of_the_matrix(decay: float) -> None:
    values = torch.arange(1.0, 401.0) ** -decay
    values[::7] *= -0.3
    matrix = with_eigenvalues(values)
    found = spectrum(lambda v: matrix @ v, 400, steps=40, probes=100, seed=1)
    assert found.largest == pytest.approx(float(values.max()), rel=1e-3)
    assert found.smallest == pytest.approx(float(values.min()), rel=1e-2)
    exact = float(values.abs().sum())
    assert 0 < found.standard_error < 0.06 * exact
    assert found.absolute_sum == pytest.approx(exact, abs=3 * found.standard_error)
    dimension = found.absolute_sum / float(values.abs().max())
    assert found.intrinsic_dimension == pytest.approx(dimension, rel=1e-3)
    near = float((values.abs() <= 0.1 * values.abs().max()).double().mean())
    assert found.share_within(0.1) == pytest.approx(near, abs=0.05)


def test_few_different_eigenvalues_end_the_iteration_early() -> None:
    found = spectrum(lambda v: 3 * v, 50, steps=10, probes=2, seed=0)
    assert found.intrinsic_dimension == pytest.approx(50)
    assert found.largest == pytest.approx(3)
    halves = torch.cat([torch.ones(25), 2 * torch.ones(25)])
    found = spectrum(lambda v: halves * v, 50, steps=10, probes=50, seed=0)
    assert found.absolute_sum == pytest.approx(75, rel=0.05)
    assert isinstance(found, Spectrum)


def test_products_are_those_of_the_hessian_of_a_network_with_attention() -> None:
    torch.manual_seed(0)
    model = Block(8, 2, bias=True).double()
    inputs = torch.randn(3, 5, 8, dtype=torch.float64)
    mask = torch.ones(3, 5, dtype=torch.bool)
    parameters = list(model.parameters())

    def loss() -> torch.Tensor:
        return model(inputs, mask).square().mean()

    product = hessian_product(loss, parameters)
    numel = sum(p.numel() for p in parameters)
    vector = torch.randn(numel, dtype=torch.float64)
    step = 1e-5

    def gradient(factor: float) -> torch.Tensor:
        pieces = vector.split([p.numel() for p in parameters])
        with torch.no_grad():
            for p, piece in zip(parameters, pieces, strict=True):
                p.add_(piece.view_as(p), alpha=factor)
        return torch.cat([g.flatten() for g in torch.autograd.grad(loss(), parameters)])

    up, down = gradient(step), gradient(-2 * step)
    gradient(step)
    torch.testing.assert_close(product(vector), (up - down) / (2 * step), rtol=1e-4, atol=1e-6)


def test_the_command_from_end_to_end(tmp_path: Path) -> None:
    small = ["--quick", "--rounds", "3", "--at", "0,3", "--steps", "4", "--probes", "2"]
    result = CliRunner().invoke(app, [*small, "--out", str(tmp_path)])
    assert result.exit_code == 0, result.output
    record = json.loads((tmp_path / "safl_spectrum.json").read_text())
    assert [row["round"] for row in record["rows"]] == [0, 3]
    assert record["settings"]["parameters"] == 15_010
    assert all(1 < row["intrinsic_dimension"] < 15_010 for row in record["rows"])
    assert (tmp_path / "spectrum.png").read_bytes().startswith(b"\x89PNG")
