"""The whole command, for real: two ranks, every kind of method, all files it should leave."""

import json
import math
from pathlib import Path

import pytest
from typer.testing import CliRunner

from benchmarks.lab import processes
from benchmarks.lab.model import GPT
from benchmarks.lab.runs import Figures, Run
from benchmarks.report.page import render_page
from benchmarks.report.reading import read_runs
from comm_hooks.launchers.main import app
from tests.torchrun import Torchrun

DIVERGING = "bf16+adamw:lr=1e30"
HOOKS = "all_reduce,none,powersgd:rank=1,topk:density=0.05,sign+compressed_adam"
STEPS = 6


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, torchrun: Torchrun) -> Path:
    """The report of one comparison."""
    folder = tmp_path_factory.mktemp("compare") / "report"
    data = folder.parent / "text.txt"
    data.write_text("".join(f"{i} bottles of beer on the wall, " for i in range(3000)))
    # The one that fails comes first: the others must not mind.
    arguments = ["--hooks", f"{DIVERGING},{HOOKS}", "--quick", "--steps", STEPS, "--eval-every", 3]
    arguments += ["--data", data, "--out", folder]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(processes, "TORCHRUN", (str(torchrun.command),))
        result = CliRunner().invoke(app, ["compare", *map(str, arguments)])
    assert result.exit_code == 1, result.output
    assert result.stdout.startswith("Too few steps: 6, of which the learning rate rises for 3. ")
    for run in read_runs(folder / "runs.jsonl"):
        if run.figures is None:
            continue
        row = next(line for line in result.stdout.splitlines() if line.startswith(f"{run.method} "))
        assert f" {run.figures.loss:.3f} " in row
        assert f" {run.figures.drift:.2g} " in row
    return folder


@pytest.fixture(scope="module")
def runs(folder: Path) -> dict[str, Run]:
    """The records of the methods that should have worked."""
    return {run.method: run for run in read_runs(folder / "runs.jsonl")[1:]}


def figures(run: Run) -> Figures:
    assert run.failure is None
    assert run.figures is not None
    return run.figures


def test_every_method_trained_and_drifted_only_where_nothing_is_exchanged(
    runs: dict[str, Run],
) -> None:
    assert list(runs) == HOOKS.split(",")
    for name, run in runs.items():
        assert [point.step for point in run.curve] == [3, 6]
        assert figures(run).loss == run.curve[-1].loss
        assert figures(run).loss < run.curve[0].loss < math.log(256), name
        assert (figures(run).drift == 0) == (name != "none")
        assert 0 <= figures(run).starved <= 1
        assert figures(run).step_range_ms > 0


def test_bytes_are_those_that_cross_between_two_ranks(runs: dict[str, Run]) -> None:
    model = GPT(runs["none"].settings.model)
    full = 4 * sum(p.numel() for p in model.parameters())  # 2 (N - 1) / N of it, with N = 2
    assert figures(runs["all_reduce"]).sent_per_step == full
    assert figures(runs["all_reduce"]).bytes_sent == STEPS * full
    assert figures(runs["none"]).bytes_sent == 0
    # PowerSGD sends its first two steps uncompressed and rank 1 of each matrix from then on.
    powersgd = figures(runs["powersgd:rank=1"])
    assert 2 * full < powersgd.bytes_sent < 2.2 * full
    # 5% of the values, and where they are.
    assert 0.02 * full < figures(runs["topk:density=0.05"]).sent_per_step < 0.1 * full
    # One bit per value after the warm-up, which is half of so short a run.
    sign = figures(runs["sign+compressed_adam"])
    assert full / 32 < sign.sent_per_step < full / 16
    assert STEPS / 2 * full < sign.bytes_sent < (STEPS / 2 + 1) * full
    for run in runs.values():
        assert figures(run).bytes_received == figures(run).bytes_sent


def test_a_method_that_fails_costs_its_own_row_only(folder: Path) -> None:
    failed = read_runs(folder / "runs.jsonl")[0]
    assert failed.figures is None
    assert failed.failure is not None
    assert failed.failure.startswith("FloatingPointError: diverged")
    page = (folder / "report.html").read_text()
    row = page.split(f'data-value="{DIVERGING}"')[1].split("</tr>")[0]
    assert ">failed</td>" in row
    assert failed.failure in row
    assert "FloatingPointError" in (folder / "logs" / "1-bf16+adamw_lr=1e30.log").read_text()


def test_the_records_are_one_json_object_per_line(folder: Path) -> None:
    lines = (folder / "runs.jsonl").read_text().splitlines()
    records = [json.loads(line) for line in lines]
    assert [record["method"] for record in records] == [DIVERGING, *HOOKS.split(",")]
    assert all(record["settings"]["steps"] == STEPS for record in records)


def test_the_page_is_what_report_makes_of_the_records(folder: Path, runs: dict[str, Run]) -> None:
    page = (folder / "report.html").read_text()
    for name, run in runs.items():
        row = page.split(f'data-value="{name}"')[1].split("</tr>")[0]
        assert f">{figures(run).loss:.3f}</td>" in row
    assert page == render_page(read_runs(folder / "runs.jsonl"))
    assert f"<dd>{STEPS} steps, batch" in page


def test_the_plots_are_files(folder: Path) -> None:
    for axis in ("step", "bytes", "time"):
        assert (folder / f"loss-vs-{axis}.png").read_bytes().startswith(b"\x89PNG")
