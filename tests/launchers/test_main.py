"""The command itself: it lists its subcommands at once, and imports the one that runs."""

import subprocess
import sys

import pytest

import comm_hooks
from comm_hooks.launchers.main import _COMMANDS


def start(*arguments: str, missing: str = "", broken: str = "") -> subprocess.CompletedProcess[str]:
    """Run the command without some packages; to import a broken one is an error."""
    code = (
        "import importlib.util, sys\n"
        "find_spec = importlib.util.find_spec\n"
        f"missing = {missing!r}.split()\n"
        "importlib.util.find_spec = lambda n, *a: None if n in missing else find_spec(n, *a)\n"
        f"for name in {broken!r}.split():\n"
        "    sys.modules[name] = None\n"
        "from comm_hooks.launchers.main import app\n"
        f"app({arguments!r})\n"
    )
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)


def test_help_lists_all_commands() -> None:
    done = start("--help", broken="torch numpy")
    assert done.returncode == 0, done.stderr
    for name, summary in _COMMANDS.items():
        assert f"  {name}" in done.stdout
        assert summary in done.stdout


@pytest.mark.parametrize("name", _COMMANDS)
def test_the_help_of_a_command_needs_no_torch(name: str) -> None:
    done = start(name, "--help", broken="torch numpy")
    assert done.returncode == 0, done.stderr
    assert f"{name} [OPTIONS]" in done.stdout


def test_without_its_extra_the_command_says_what_to_install() -> None:
    done = start("--help", missing="rich typer")
    line = 'comm-hooks: the command line needs typer, rich: pip install "comm-hooks[launch]"\n'
    assert (done.returncode, done.stderr) == (2, line)


def test_names_are_imported_when_they_are_asked_for() -> None:
    for name in comm_hooks.__all__:
        assert getattr(comm_hooks, name).__name__ == name
        assert name in dir(comm_hooks)
    assert comm_hooks.compressors.TopK is comm_hooks.TopK
    with pytest.raises(AttributeError, match="has no attribute 'TopKk'"):
        _ = comm_hooks.TopKk
