"""The commands of the private studies from end to end, and what they refuse."""

import json
import statistics
from pathlib import Path

import pytest

from benchmarks.studies.private_compressed.schemes import SCHEMES
from benchmarks.studies.private_optimizers.methods import METHODS, PLAIN, PRIVATE
from tests.benchmarks.test_studies import invoke


@pytest.mark.slow
def test_optimizers_from_end_to_end(tmp_path: Path) -> None:
    arguments = ["--quick", "--steps", "4", "--batch", "48", "--sigmas", "1,2", "--points", "2"]
    result = invoke("private_optimizers", *arguments, "--seeds", "2", "--out", str(tmp_path))
    assert result.exit_code == 0, result.output
    files = {"private_optimizers.json", "curves.png"}
    assert {path.name for path in tmp_path.iterdir()} == files
    record = json.loads((tmp_path / "private_optimizers.json").read_text())
    assert record["complete"]
    assert record["settings"]["delta"] == 0.5 / 1281
    found = [(method["name"], method["labels"]["sigma"]) for method in record["methods"]]
    plain, private = (
        [name for name in names if not METHODS[name].words] for names in (PLAIN, PRIVATE)
    )
    assert found == [
        *((name, None) for name in plain),
        *((name, sigma) for sigma in (1.0, 2.0) for name in private),
    ]
    ends = {}
    for method in record["methods"]:
        assert [len(curve) for curve in method["curves"]] == [2, 2]
        assert f"{100 * method['mean_error']:.2f}" in result.stdout
        if method["labels"]["sigma"]:
            epsilons = {tuple(p["epsilon"] for p in curve) for curve in method["curves"]}
            ends.setdefault(method["labels"]["sigma"], set()).update(epsilons)
    # All methods of one noise multiplier spend the same, and less with more noise.
    assert [len(found) for found in ends.values()] == [1, 1]
    (strong,), (weak,) = ends[1.0], ends[2.0]
    assert 0 < strong[0] < strong[1]
    assert weak[1] < strong[1]
    assert f"{strong[1]:.2f}" in result.stdout
    tries = {method["name"]: len(method["tries"]) for method in record["methods"]}
    assert tries["DP-Adam"] == 1
    assert tries["DP-AdamBC"] == 2  # one for each floor at least


@pytest.mark.slow
def test_compressed_from_end_to_end(tmp_path: Path) -> None:
    arguments = ["--quick", "--steps", "2", "--batch", "16", "--ranks", "2,3", "--points", "1"]
    optimizers = ["--optimizers", "DP-SGD,DP-Adam"]
    result = invoke(
        "private_compressed", *arguments, *optimizers, "--seeds", "2", "--out", str(tmp_path)
    )
    assert result.exit_code == 0, result.output
    files = {"private_compressed.json", "curves.png"}
    assert {path.name for path in tmp_path.iterdir()} == files
    methods = json.loads((tmp_path / "private_compressed.json").read_text())["methods"]
    assert [(m["labels"]["ranks"], m["labels"]["optimizer"], m["name"]) for m in methods] == [
        (ranks, optimizer, scheme)
        for ranks in (2, 3)
        for optimizer in ("DP-SGD", "DP-Adam")
        for scheme in SCHEMES
    ]
    for method in methods:
        assert f"{100 * method['mean_error']:.2f}" in result.stdout
        assert method["mean_error"] == pytest.approx(statistics.mean(method["errors"]))
    lines = [line.split() for line in result.stdout.splitlines() if ":" in line]
    peers = {cells[2]: cells[-1] for cells in lines if cells[0] == "2"}
    assert peers["central:dense"] == "none"
    assert float(peers["local:topk"]) < float(peers["shares:srht"])


@pytest.mark.slow
def test_moments_from_end_to_end(tmp_path: Path) -> None:
    arguments = ["--at", "3,20", "--coordinates", "500", "--beta2", "0.9", "--strengths", "0,2"]
    result = invoke("private_moments", *arguments, "--out", str(tmp_path))
    assert result.exit_code == 0, result.output
    assert [path.name for path in tmp_path.iterdir()] == ["private_moments.json"]
    record = json.loads((tmp_path / "private_moments.json").read_text())
    assert [(row["step"], row["strength"]) for row in record["moments"]] == [
        (3, 0.0),
        (3, 2.0),
        (20, 0.0),
        (20, 2.0),
    ]
    for row in record["moments"]:
        assert f"{row['v_hat']:.4f}" in result.stdout
        assert f"{100 * row['spread']:.3f}" in result.stdout
    again = invoke("private_moments", *arguments, "--out", str(tmp_path / "again"))
    assert again.stdout.splitlines()[:-1] == result.stdout.splitlines()[:-1]
