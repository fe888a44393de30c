"""The command that compares predictions with a network of capped links."""

import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from benchmarks.netns import why_not
from benchmarks.netns.check_predictions import app

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--ranks", "1"], "--ranks '1': write numbers of at least 2"),
        (["--ranks", "2,x"], "--ranks '2,x': write numbers of at least 2"),
        (["--rates", "100mbps"], "100mbps"),
        (["--methods", "topq"], "did you mean 'topk'?"),
    ],
)
def test_what_is_refused(arguments: list[str], said: str) -> None:
    result = CliRunner().invoke(app, ["check", *arguments])
    assert result.exit_code == 2, result.output
    assert result.stdout == ""
    assert result.stderr.count("\n") == 1
    assert said in result.stderr


@pytest.mark.slow
@pytest.mark.skipif(bool(why_not()), reason=why_not() or "")
def test_a_row_for_each_method_and_an_exit_code_by_the_limit() -> None:
    command = [sys.executable, "-m", "benchmarks.netns.check_predictions"]
    options = ["--ranks", "2", "--rates", "1gbit", "--methods", "topk:collective=sharded"]
    run = subprocess.run(
        [*command, *options, "--limit", "0"], cwd=ROOT, capture_output=True, text=True, timeout=300
    )
    assert run.returncode == 1, run.stderr
    *_, row = run.stdout.splitlines()
    cells = [cell.strip() for cell in row.strip("|").split("|")]
    assert cells[:3] == ["2", "1gbit", "`topk:collective=sharded`"]
    without, predicted, measured = map(float, cells[3:6])
    assert min(predicted, measured) > 0.5 * without > 0
    # Both are rounded to milliseconds.
    assert float(cells[6].removesuffix(" %")) == pytest.approx(
        100 * (predicted / measured - 1), abs=2
    )
