"""The command that runs programs in a network of capped links."""

import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.netns import why_not


@pytest.mark.slow
@pytest.mark.skipif(bool(why_not()), reason=why_not() or "")
def test_the_command_line() -> None:
    def run(*arguments: str) -> "subprocess.CompletedProcess[str]":
        return subprocess.run(
            [sys.executable, "-m", "benchmarks.netns", *arguments],
            capture_output=True,
            text=True,
            check=False,
            cwd=Path(__file__).parents[2],
        )

    script = 'echo "$RANK of $PET_NNODES at $MASTER_ADDR"; exit $((3 * RANK))'
    done = run("-n", "2", "--rate", "1gbit", "--", "sh", "-c", script)
    assert done.returncode == 3
    assert "0 of 2 at 10.77.0.1" in done.stdout
    assert "1 of 2" not in done.stdout  # who succeeds is heard from rank 0 only
    assert "rank 1:\n1 of 2 at 10.77.0.1" in done.stderr
    assert "rank 1: exit code 3, sent" in done.stdout
    refused = run("--rate", "1mbps", "--", "true")
    assert (refused.returncode, refused.stderr.count("\n")) == (2, 1)
