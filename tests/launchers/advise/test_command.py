"""The command: what it prints, what it refuses, and that it runs under launchers."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner, Result

from comm_hooks.launchers.advise.command import advise
from comm_hooks.launchers.advise.methods import Planner
from comm_hooks.launchers.advise.step import Step
from comm_hooks.launchers.environment import LauncherEnvironment
from comm_hooks.launchers.network import Endpoint, free_port
from tests.torchrun import Torchrun

MODEL = ("--params", "3e5", "--step-ms", "50")
GIVEN = (*MODEL, "--ranks", "2", "--bandwidth", "10mbit")


@pytest.fixture(autouse=True)
def _alone_in_an_empty_folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("RANK", "WORLD_SIZE", "PMI_RANK", "OMPI_COMM_WORLD_RANK", "SLURM_PROCID"):
        monkeypatch.delenv(name, raising=False)


def run(*arguments: str) -> Result:
    app = typer.Typer()
    app.command()(advise)
    return CliRunner().invoke(app, arguments)


def row_of(output: str, method: str) -> list[str]:
    return next(line.split() for line in output.splitlines() if line.split()[:1] == [method])


def test_a_link_that_is_described() -> None:
    methods = "all_reduce,none,bf16,identity:bits=16,low_communication"
    result = run(*GIVEN, "--methods", methods, "--min-share", "0.5")
    assert result.exit_code == 0, result.output
    assert "0.3 M parameters (float32), 50 ms per step without exchange, 2 ranks" in result.output
    assert row_of(result.output, "all_reduce")[4:6] == ["1.2", "MB"]
    assert row_of(result.output, "identity:bits=16")[4:6] == ["602", "kB"]
    assert "bf16 is left out: DDP takes PyTorch's bf16_compress_hook with NCCL" in result.output
    assert row_of(result.output, "none")[1] == "50"
    # 1.2 MB at 10 Mbit/s are 0.96 s, and headers and the like come on top.
    assert 1000 < int(row_of(result.output, "all_reduce")[1].replace(",", "")) < 1500
    assert "Recommended: low_communication (" in result.output
    assert "(none - method) / (none - all-reduce) in held-out" in result.output


def test_a_step_that_was_measured() -> None:
    Step(((64, 64), (100,)), milliseconds=7.0).save("step.json")
    methods = ("--methods", "all_reduce,sign")
    result = run("--step", "step.json", "--ranks", "3", "--bandwidth", "1gbit", *methods)
    assert result.exit_code == 0, result.output
    assert "0.0042 M parameters (float32), 7 ms per step" in result.output
    assert "3 ranks" in result.output


@pytest.mark.parametrize(("share", "noted"), [(0.1, False), (0.4, True)])
def test_a_busy_machine_is_noted(
    share: float, noted: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Planner, "busy_share", share)
    result = run(*GIVEN, "--methods", "all_reduce")
    assert ("Other programs had the processor for 40%" in result.output) == noted


def test_zero() -> None:
    result = run(*GIVEN, "--zero-stage", "2", "--methods", "all_reduce,bf16,low_communication")
    assert result.exit_code == 0, result.output
    assert row_of(result.output, "all_reduce")[4:6] == ["1.8", "MB"]
    assert "low_communication is left out: ZeRO stage 2 divides the optimizer" in result.output
    assert "bytes shrink to a third at best" in result.output


def test_no_method_that_keeps_so_much() -> None:
    result = run(*GIVEN, "--methods", "count_sketch", "--min-share", "0.99")
    assert result.exit_code == 0
    assert "No method here is known to keep 99% on every task" in result.output


def test_what_may_be_worse_than_nothing_is_not_offered() -> None:
    link = ("--ranks", "4", "--bandwidth", "1mbit")
    result = run(*MODEL, *link, "--methods", "all_reduce,count_sketch")
    assert row_of(result.output, "count_sketch")[6].startswith("-")  # known to keep less than none
    assert "Recommended: all_reduce" in result.output
    assert "admits it" not in result.output


def test_faster_methods_that_keep_less_are_named() -> None:
    link = ("--ranks", "8", "--bandwidth", "1mbit")
    methods = ("--methods", "all_reduce,low_communication:bits=0.12")
    result = run(*MODEL, *link, *methods)
    assert result.exit_code == 0, result.output
    assert "Recommended: all_reduce" in result.output
    method, _, share = result.output.partition(" is faster, but keeps only ")
    assert method.endswith("low_communication:bits=0.12")
    lower = re.search(r"--min-share ([\d.]+) admits it", share)
    assert lower
    result = run(*MODEL, *link, *methods, "--min-share", lower[1])
    assert "Recommended: low_communication:bits=0.12" in result.output
    assert "admits it" not in result.output


@pytest.mark.filterwarnings("error")
def test_rounds_are_planned_for_no_length_of_training_in_particular() -> None:
    """150 steps, a laboratory's own, would allow no rounds as thin as these."""
    link = ("--params", "2e6", "--step-ms", "300", "--ranks", "4", "--bandwidth", "10mbit")
    result = run(*link, "--methods", "all_reduce,low_communication:bits=0.008")
    assert "total_steps" not in result.output
    assert "low_communication:bits=0.008" in result.output


def test_beyond_the_ranks_that_were_measured_nothing_takes_the_place_of_all_reduce() -> None:
    link = ("--ranks", "1000", "--bandwidth", "10mbit")
    result = run(*MODEL, *link, "--methods", "all_reduce,low_communication:bits=10000")
    assert result.exit_code == 0
    assert "nothing was measured of these methods with 1000 ranks" in result.output
    assert "Recommended: all_reduce" in result.output


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (MODEL, "one rank only, so there is nothing to compress between"),
        ((*MODEL, "--bandwidth", "1gbit"), "one rank only"),
        ((*GIVEN, "--methods", "topj"), "unknown method 'topj': did you mean 'topk'?"),
        ((*GIVEN, "--methods", "topk:densty=1"), "did you mean 'density'?"),
        ((*GIVEN, "--ranks", "1"), "--ranks must be at least 2"),
        ((*GIVEN, "--ranks", "-2"), "--ranks must be at least 2"),
        ((*GIVEN, "--params", "-4"), "--params must be a positive whole number, got -4"),
        ((*GIVEN, "--params", "0.5"), "--params must be a positive whole number, got 0.5"),
        ((*GIVEN, "--params", "nan"), "--params must be a positive whole number"),
        ((*GIVEN, "--step-ms", "0"), "--step-ms must be positive"),
        ((*GIVEN, "--batch", "0"), "--batch must be positive, got 0"),
        ((*GIVEN, "--tokens-per-parameter", "-1"), "--tokens-per-parameter must be positive"),
        ((*GIVEN, "--tokens-per-parameter", "inf"), "--tokens-per-parameter must be finite"),
        ((*GIVEN, "--min-share", "0"), "--min-share must be positive, got 0"),
        ((*GIVEN, "--dtype", "int8"), "dtype must be one of float32"),
        ((*GIVEN, "--bandwidth", "fast"), "write it as 100mbit"),
        ((*GIVEN, "--bandwidth", "0mbit"), "write it as 100mbit"),
        ((*GIVEN, "--latency-ms", "-1"), "--latency-ms must not be negative"),
        ((*MODEL, "--ranks", "2", "--latency-ms", "1"), "--latency-ms goes with --bandwidth"),
        ((*GIVEN, "--zero-stage", "3"), "--zero-stage must be 0, 1 or 2, got 3"),
        ((*GIVEN, "--timeout", "0"), "--timeout must be positive"),
        ((*GIVEN, "--step", "step.json"), "leave out --params and --step-ms"),
        (("--step", "step.json", *GIVEN[4:]), "step.json: cannot be read"),
        (GIVEN[2:], "give --params and --step-ms, or --step"),
    ],
)
def test_bad_input(arguments: tuple[str, ...], message: str) -> None:
    result = run(*arguments)
    assert result.exit_code == 2
    (line,) = [line for line in result.stderr.splitlines() if line]
    assert line.startswith("comm-hooks advise: ")
    assert message in line


def test_bad_input_is_told_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    result = run(*MODEL, "--methods", "topj")
    assert (result.exit_code, result.stderr) == (2, "")


def test_under_torchrun(torchrun: Torchrun) -> None:
    command = [
        *(str(torchrun.command), "--nproc-per-node", "2", "--standalone"),
        *("-m", "comm_hooks.launchers.main", "advise", *MODEL),
        *("--methods", "all_reduce,sign,low_communication"),
    ]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=240)
    assert done.returncode == 0, done.stderr
    for ends in ("0 to rank 1", "1 to rank 0"):
        line = rf"rank {ends}: [\d.]+ [MG]bit/s, [\d.]+ ms"
        assert len(re.findall(line, done.stdout)) == 1
    assert done.stdout.count("Recommended: ") == 1


def test_ranks_that_do_not_come() -> None:
    process = LauncherEnvironment("torchrun", 1, 2).variables(Endpoint("127.0.0.1", free_port()))
    done = subprocess.run(
        [sys.executable, "-m", "comm_hooks.launchers.main", "advise", *MODEL, "--timeout", "1"],
        env={**os.environ, **process},
        capture_output=True,
        text=True,
        check=False,
        timeout=240,
    )
    assert done.returncode == 2
    assert done.stderr.count("\n") == 1
    assert "rank 1 of 2 did not reach the others" in done.stderr
