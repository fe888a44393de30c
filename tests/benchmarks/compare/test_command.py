"""The command line: bad input gets one line and exit code 2, before anything is launched."""

import sys
from functools import partial
from pathlib import Path

import pytest
from typer.testing import CliRunner

from benchmarks.compare import run as command
from benchmarks.lab.methods import Method
from benchmarks.lab.runs import Figures, Run, Settings
from benchmarks.report.reading import read_runs
from comm_hooks.launchers.main import app
from tests.refusing import refusal


@pytest.fixture(autouse=True)
def _nothing_may_be_launched(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def refuse(*arguments: object) -> None:
        raise AssertionError("a method was launched")

    monkeypatch.setattr(command, "run_method", refuse)
    monkeypatch.chdir(tmp_path)


complaint = partial(refusal, app, "python -m benchmarks.compare", "compare")


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
    ],
)
def test_a_bad_option_is_refused(arguments: list[str], message: str, tmp_path: Path) -> None:
    assert message in complaint(*arguments)
    assert not list(tmp_path.iterdir())


def test_data_that_is_no_text_is_refused(tmp_path: Path) -> None:
    folder = tmp_path / "folder"
    folder.mkdir()
    assert "folder: no text in this directory" in complaint("--data", str(folder))
    (folder / "image").write_bytes(b"\xff\xd8\0")
    assert "1 files are not UTF-8" in complaint("--data", str(folder))
    assert "image: not text" in complaint("--data", str(folder / "image"))


def test_a_text_too_short_for_its_ranks_is_refused(tmp_path: Path) -> None:
    text = tmp_path / "short.txt"
    text.write_text("")
    assert "0 bytes of text are too few for 2 shards" in complaint("--data", str(text))
    text.write_text("x" * 500)
    assert "give 516 bytes or more" in complaint("--data", str(text), "--nproc", "4")


@pytest.mark.skipif(sys.platform != "linux", reason="needs a file that not even root can read")
def test_data_that_cannot_be_read_is_refused() -> None:
    assert "cannot read /proc/self/mem: Input/output error" in complaint("--data", "/proc/self/mem")


def test_an_out_that_cannot_be_written_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    for out in ("file", "file/below"):
        assert f"--out {out}: cannot write there" in complaint("--out", out)
    assert (tmp_path / "file").read_text() == "in the way"


def test_an_interruption_keeps_what_is_finished(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def run_method(method: Method, settings: Settings, *rest: object, timeout: float) -> Run:
        if method.spec == "none":
            raise KeyboardInterrupt
        return Run(method.spec, "", settings, [], Figures(2.5, 0.0, 1.0, 4.0, 4.0, 8, 8))

    monkeypatch.setattr(command, "run_method", run_method)
    result = CliRunner().invoke(app, ["compare", "--hooks", "all_reduce,none,bf16", "--out", "r"])
    assert result.exit_code == 130
    assert "interrupted, 1 of 3 methods finished" in result.stderr
    assert "all_reduce 2.500" in " ".join(result.stdout.split())
    assert [run.method for run in read_runs(tmp_path / "r" / "runs.jsonl")] == ["all_reduce"]
    assert 'data-value="all_reduce"' in (tmp_path / "r" / "report.html").read_text()


def test_help_and_no_command_name_what_there_is() -> None:
    for arguments in ([], ["--help"]):
        assert "compare" in CliRunner().invoke(app, arguments).output
    assert "--hooks" in CliRunner().invoke(app, ["compare", "--help"]).stdout
