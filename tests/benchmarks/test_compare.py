"""The comparison: bad input gets one line; two ranks train by every kind of method."""

import math
import sys
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from benchmarks.compare import __main__ as command
from benchmarks.lab.methods import Pair
from benchmarks.lab.model import GPT, GPTConfig
from benchmarks.lab.runs import Figures, Run, RunSpec, Settings
from benchmarks.report import read_runs
from tests.refusing import refusal

complaint = partial(refusal, command.app, "python -m benchmarks.compare")


@pytest.fixture
def nothing_may_be_launched(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def refuse(*arguments: object) -> None:
        raise AssertionError("a method was launched")

    monkeypatch.setattr(command, "run_method", refuse)
    monkeypatch.chdir(tmp_path)


@pytest.mark.usefixtures("nothing_may_be_launched")
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--hooks", "powersdg"], "did you mean 'powersgd'?"),
        (["--hooks", "topk:density=1.5"], "must lie in (0, 1], got 1.5"),
        (["--hooks", "topk:desnity=0.1"], "did you mean 'density'?"),
        (["--nproc", "0"], "--nproc must be at least 1, got 0"),
        (["--steps", "0"], "--steps must be at least 1, got 0"),
        (["--eval-every", "-1"], "--eval-every must be at least 1, got -1"),
        (["--seed", "-1"], "--seed must lie between 0"),
        (["--timeout", "0"], "--timeout must be positive"),
        (["--data", "absent"], "--data absent: no such file or directory"),
        (["--out", "/dev/null/below"], "--out /dev/null/below: cannot write there"),
    ],
)
def test_a_bad_option_is_refused(arguments: list[str], message: str, tmp_path: Path) -> None:
    assert message in complaint(*arguments)
    assert not list(tmp_path.iterdir())


@pytest.mark.usefixtures("nothing_may_be_launched")
def test_data_that_is_no_text_or_too_short_is_refused(tmp_path: Path) -> None:
    folder = tmp_path / "folder"
    folder.mkdir()
    assert "folder: no text in this directory" in complaint("--data", str(folder))
    (folder / "image").write_bytes(b"\xff\xd8\0")
    assert "1 files are not UTF-8" in complaint("--data", str(folder))
    assert "image: not text" in complaint("--data", str(folder / "image"))
    text = tmp_path / "short.txt"
    text.write_text("x" * 500)
    assert "give 516 bytes or more" in complaint("--data", str(text), "--nproc", "4")
    if sys.platform == "linux":  # a file that not even root can read
        assert "cannot read /proc/self/mem" in complaint("--data", "/proc/self/mem")


def test_the_table_is_shown_after_three_methods_and_an_interruption_keeps_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def run_method(pair: Pair, settings: Settings, *rest: object, timeout: float) -> Run:
        if pair.spec == "topk":
            raise KeyboardInterrupt
        spec = RunSpec(pair.spec, {}, {"lr": 0.1}, 0)
        return Run(spec, figures=Figures(2.5, 1.0, 4.0, 4.0, 8, 8, drift=0.0))

    monkeypatch.setattr(command, "run_method", run_method)
    out = tmp_path / "r"
    result = CliRunner().invoke(command.app, ["--out", str(out), "--steps", "10"])
    assert result.exit_code == 130
    assert "interrupted, 4 of 5 methods finished" in result.stderr
    assert result.stdout.startswith("Too few steps: 10, with 5 of warm-up.")
    tables = result.stdout.split("vs all_reduce")[1:]
    assert ["low_communication" in table for table in tables] == [True, True]
    assert ["sign+local_variance_adam" in table.split("[5/5]")[0] for table in tables][1]
    assert (out / "report.html").exists()


HOOKS = "bf16+adamw:lr=1e30,all_reduce,none,powersgd:rank=1,topk:density=0.05,sign+one_bit_adam"
STEPS = 6


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Run]:
    """The records of one comparison; the method that fails comes first."""
    folder = tmp_path_factory.mktemp("compare")
    data = folder / "text.txt"
    data.write_text("".join(f"{i} bottles of beer on the wall, " for i in range(3000)))
    arguments: list[Any] = ["--hooks", HOOKS, "--quick", "--steps", STEPS, "--eval-every", 3]
    arguments += ["--data", data, "--out", folder / "out"]
    with pytest.MonkeyPatch.context() as patch:
        small = Settings(
            steps=STEPS, eval_every=3, warmup=3, model=GPTConfig(2, 64, 2, 16), eval_windows=16
        )
        patch.setattr(command, "make_settings", lambda *given: small)
        result = CliRunner().invoke(command.app, list(map(str, arguments)))
    assert result.exit_code == 1, result.output
    assert "FloatingPointError" in next((folder / "out/logs").glob("1-*")).read_text()
    found = {run.method: run for run in read_runs(folder / "out" / "runs.jsonl")}
    assert ",".join(found) == HOOKS
    return found


def figures(run: Run) -> Figures:
    assert run.failure is None
    assert run.figures is not None
    return run.figures


@pytest.mark.slow
def test_every_method_trained_and_drifted_only_where_nothing_is_exchanged(
    runs: dict[str, Run],
) -> None:
    failed, *finished = runs.values()
    assert failed.figures is None
    assert (failed.failure or "").startswith("FloatingPointError: diverged")
    for run in finished:
        assert [point.round for point in run.curve] == [3, 6]
        assert figures(run).loss == run.curve[-1].loss
        assert figures(run).loss < run.curve[0].loss < math.log(256), run.method
        assert (figures(run).drift == 0) == (run.method != "none")
        assert 0 <= (figures(run).starved or 0.0) <= 1
        assert figures(run).bytes_received == figures(run).bytes_sent


@pytest.mark.slow
def test_bytes_are_those_that_cross_between_two_ranks(runs: dict[str, Run]) -> None:
    full = 4 * sum(p.numel() for p in GPT(GPTConfig(2, 64, 2, 16)).parameters())
    assert figures(runs["all_reduce"]).sent_per_step == full  # 2 (N - 1) / N of it, with N = 2
    assert figures(runs["all_reduce"]).bytes_sent == STEPS * full
    assert figures(runs["none"]).bytes_sent == 0
    # PowerSGD sends its first two steps uncompressed and rank 1 of each matrix from then on.
    assert 2 * full < figures(runs["powersgd:rank=1"]).bytes_sent < 2.5 * full
    # 5% of the values, and where they are.
    assert 0.02 * full < figures(runs["topk:density=0.05"]).sent_per_step < 0.15 * full
    # One bit per value after the warm-up, which is half of so short a run.
    sign = figures(runs["sign+one_bit_adam"])
    assert full / 32 < sign.sent_per_step < full / 8
    assert STEPS / 2 * full < sign.bytes_sent < (STEPS / 2 + 1) * full
