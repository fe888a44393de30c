"""``comm-hooks launch --dry-run`` from tests: what it would run, in a made-up environment."""

import shlex
from collections.abc import Mapping

import pytest
from typer.testing import CliRunner

from comm_hooks.launchers.main import app

# What could make a test depend on where it runs.
_OURS = ("SLURM_", "PMI_", "OMPI_", "MPI_", "PET_", "DS_")
_EXACT = ("RANK", "WORLD_SIZE", "GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME", "OMP_NUM_THREADS")


def forget_launchers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Remove what launchers and users set."""
    import os

    for name in list(os.environ):
        if name.startswith(_OURS) or name in _EXACT:
            monkeypatch.delenv(name)


def dry_run(*arguments: str) -> list[str]:
    """Return the lines that ``launch --dry-run`` prints."""
    result = CliRunner().invoke(app, ["launch", "--dry-run", *arguments])
    assert result.exit_code == 0, result.output
    return result.stdout.splitlines()


def split(line: str) -> tuple[dict[str, str], list[str]]:
    """Return the variables and the arguments of a line of shell."""
    words = shlex.split(line)
    count = next(i for i, word in enumerate(words) if "=" not in word or word.startswith("-"))
    return dict(word.split("=", 1) for word in words[:count]), words[count:]


def complaint(*arguments: str, environment: Mapping[str, str] | None = None) -> str:
    """Run ``launch``, check that it refuses with one line and exit code 2, and return the line."""
    result = CliRunner().invoke(app, ["launch", *arguments], env=environment)
    assert result.exit_code == 2, result.output
    assert result.stdout == ""
    assert result.stderr.count("\n") == 1
    assert result.stderr.startswith("comm-hooks launch: ")
    return result.stderr
