"""The command: what it prints, and what it refuses."""

import re

import pytest
import typer
from typer.testing import CliRunner, Result

from comm_hooks.launchers.advise.command import advise

MODEL = ("--params", "3e5", "--step-ms", "50")
GIVEN = (*MODEL, "--ranks", "2", "--bandwidth", "10mbit")


def run(*arguments: str) -> Result:
    app = typer.Typer()
    app.command()(advise)
    return CliRunner().invoke(app, arguments)


def row_of(output: str, method: str) -> list[str]:
    return next(line.split() for line in output.splitlines() if line.split()[:1] == [method])


def test_a_row_for_each_method_and_a_recommendation() -> None:
    methods = "all_reduce,none,identity:bits=16,low_communication"
    result = run(*GIVEN, "--methods", methods, "--min-share", "0.5")
    assert result.exit_code == 0, result.output
    assert "0.3 M parameters, 50 ms per step without exchange, 2 ranks" in result.output
    assert row_of(result.output, "all_reduce")[4:6] == ["1.2", "MB"]
    assert row_of(result.output, "identity:bits=16")[4:6] == ["602.0", "kB"]
    assert row_of(result.output, "none")[1] == "50"
    # 1.2 MB at 10 Mbit/s are 0.96 s, and headers and the like come on top.
    assert 1000 < int(row_of(result.output, "all_reduce")[1].replace(",", "")) < 1500
    assert "Recommended: low_communication (" in result.output
    assert "(none - method) / (none - all-reduce) in held-out" in result.output


def test_half_precision_gradients_are_half_as_long() -> None:
    result = run(*GIVEN, "--half", "--methods", "all_reduce")
    assert row_of(result.output, "all_reduce")[4:6] == ["600.0", "kB"]


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


def test_beyond_the_ranks_that_were_measured_nothing_takes_the_place_of_all_reduce() -> None:
    link = ("--ranks", "1000", "--bandwidth", "10mbit")
    result = run(*MODEL, *link, "--methods", "all_reduce,low_communication:bits=10000")
    assert result.exit_code == 0
    assert "nothing was measured of these methods with 1000 ranks" in result.output
    assert "Recommended: all_reduce" in result.output


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((*GIVEN, "--methods", "topj"), "unknown method 'topj': did you mean 'topk'?"),
        ((*GIVEN, "--methods", "topk:densty=1"), "did you mean 'density'?"),
        ((*GIVEN, "--methods", "marina"), "method 'marina': "),
        ((*GIVEN, "--ranks", "1"), "--ranks must be at least 2"),
        ((*GIVEN, "--ranks-per-node", "0"), "--ranks-per-node must be positive"),
        ((*GIVEN, "--params", "-4"), "--params must be a positive whole number, got -4"),
        ((*GIVEN, "--params", "0.5"), "--params must be a positive whole number, got 0.5"),
        ((*GIVEN, "--params", "nan"), "--params must be a positive whole number"),
        ((*GIVEN, "--step-ms", "0"), "--step-ms must be positive"),
        ((*GIVEN, "--step-ms", "inf"), "--step-ms must be finite"),
        ((*GIVEN, "--min-share", "0"), "--min-share must lie in (0, 1], got 0"),
        ((*GIVEN, "--min-share", "2"), "--min-share must lie in (0, 1], got 2"),
        ((*GIVEN, "--methods", ""), "a method is missing in ''"),
        ((*GIVEN, "--methods", "all_reduce,"), "a method is missing in 'all_reduce,'"),
        ((*GIVEN, "--bandwidth", "fast"), "write it as 100mbit"),
        ((*GIVEN, "--bandwidth", "0mbit"), "write it as 100mbit"),
        ((*GIVEN, "--latency-ms", "-1"), "--latency-ms must not be negative"),
    ],
)
def test_bad_input(arguments: tuple[str, ...], message: str) -> None:
    result = run(*arguments)
    assert result.exit_code == 2
    (line,) = [line for line in result.stderr.splitlines() if line]
    assert line.startswith("comm-hooks advise: ")
    assert message in line
