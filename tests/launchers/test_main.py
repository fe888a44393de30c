"""The command itself: it lists its subcommands at once, and imports the one that runs."""

import importlib
import subprocess
import sys

import pytest
from typer.testing import CliRunner

import comm_hooks
from comm_hooks.launchers.main import _COMMANDS, app


def test_help_lists_all_and_imports_none() -> None:
    code = (
        "import sys\n"
        "from comm_hooks.launchers.main import app\n"
        "try:\n"
        "    app(['--help'])\n"
        "finally:\n"
        "    assert 'torch' not in sys.modules and 'numpy' not in sys.modules\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    for name, (_, summary) in _COMMANDS.items():
        assert f"  {name}" in done.stdout
        assert summary in done.stdout


@pytest.mark.parametrize("name", _COMMANDS)
def test_every_command_is_there(name: str) -> None:
    module = importlib.import_module(f"comm_hooks.launchers.{name}.command")
    assert callable(getattr(module, name))
    result = CliRunner().invoke(app, [name, "--help"])
    assert result.exit_code == 0
    assert name in result.output


def test_names_are_imported_when_they_are_asked_for() -> None:
    for name in comm_hooks.__all__:
        assert getattr(comm_hooks, name).__name__ == name
        assert name in dir(comm_hooks)
    assert comm_hooks.compressors.TopK is comm_hooks.TopK
    with pytest.raises(AttributeError, match="has no attribute 'TopKk'"):
        _ = comm_hooks.TopKk
