"""The command line: bad input gets one line and exit code 2, and no network 77, before anything."""

from pathlib import Path

import pytest
from typer.testing import CliRunner

from benchmarks.bench import __main__ as command
from benchmarks.bench.results import Result
from benchmarks.lab.methods import Pair
from benchmarks.lab.runs import Figures, Run, RunSpec, Settings
from tests.refusing import refusal

PUBLISHED = Path(__file__).parents[3] / "benchmarks/results/bench"


@pytest.fixture(autouse=True)
def _nothing_may_be_launched(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def refuse(*arguments: object) -> None:
        raise AssertionError("a method was launched")

    monkeypatch.setattr(command, "run_method", refuse)
    monkeypatch.setattr(command, "why_not", lambda: None)
    monkeypatch.chdir(tmp_path)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--rate", "100mbps"], "--rate: rate '100mbps': write a number and a unit"),
        (["--rate", "1gbit,1gbit"], "named twice"),
        (["--hooks", "powersdg"], "did you mean 'powersgd'?"),
        (["--hooks", "topk:density=1.5"], "must lie in (0, 1], got 1.5"),
        (["--nproc", "1"], "--nproc must lie between 2 and 200, got 1"),
        (["--nproc", "201"], "--nproc must lie between 2 and 200, got 201"),
        (["--steps", "0"], "--steps must be at least 1, got 0"),
        (["--timing-steps", "0"], "--timing-steps must be at least 1, got 0"),
        (["--seed", "-1"], "--seed must lie between 0"),
        (["--timeout", "0"], "--timeout must be positive"),
        (["--data", "absent"], "--data absent: no such file or directory"),
        (["--redraw", "--out", "absent"], "absent/results.json: cannot be read"),
        (["--out", "/dev/null/below"], "--out /dev/null/below: cannot write there"),
    ],
)
def test_a_bad_option_is_refused(arguments: list[str], message: str, tmp_path: Path) -> None:
    assert message in refusal(command.app, "python -m benchmarks.bench", *arguments)
    assert not list(tmp_path.iterdir())


def test_where_there_can_be_no_network_it_skips(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(command, "why_not", lambda: "no network namespaces: making them needs root")
    result = CliRunner().invoke(command.app, [])
    assert result.exit_code == 77
    assert result.stdout == ""
    assert result.stderr == (
        "python -m benchmarks.bench: skipped, no network namespaces: making them needs root\n"
    )


def test_an_interruption_keeps_what_is_finished(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def run_method(pair: Pair, settings: Settings, *rest: object, timeout: float) -> Result:
        if pair.spec == "none":
            raise KeyboardInterrupt
        figures = Figures(2.5, 1.0, 4.0, 4.0, 8, 8)
        spec = RunSpec(pair.spec, {}, {"lr": 0.1}, 0)
        return Result(Run(spec, figures=figures))

    monkeypatch.setattr(command, "run_method", run_method)
    result = CliRunner().invoke(command.app, ["--hooks", "all_reduce,none,bf16", "--out", "r"])
    assert result.exit_code == 130
    assert "interrupted, 1 of 3 methods finished" in result.stderr
    assert "all_reduce 2.500" in " ".join(result.stdout.split())
    assert "`all_reduce` | 2.500" in (tmp_path / "r" / "results.md").read_text()
    assert "interrupted" not in (tmp_path / "r" / "results.json").read_text()


def test_results_are_drawn_again_from_their_record(tmp_path: Path) -> None:
    record = PUBLISHED / "results.json"
    (tmp_path / "results.json").write_bytes(record.read_bytes())
    result = CliRunner().invoke(command.app, ["--redraw", "--out", str(tmp_path)])
    assert result.exit_code == 0
    assert (tmp_path / "results.md").read_text() == (PUBLISHED / "results.md").read_text()
    (tmp_path / "results.json").write_text("[1")
    result = CliRunner().invoke(command.app, ["--redraw", "--out", str(tmp_path)])
    assert result.exit_code == 2
    assert "is not JSON" in result.stderr
