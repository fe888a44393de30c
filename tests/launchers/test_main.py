"""The command itself: it lists its subcommands at once, and imports the one that runs."""

import importlib
import subprocess
import sys
from typing import get_type_hints

import pytest

import comm_hooks
from comm_hooks.launchers.main import _COMMANDS


def start(*arguments: str, without: str = "") -> subprocess.CompletedProcess[str]:
    """Run the command where importing these modules fails."""
    code = (
        "import sys\n"
        f"for name in {without!r}.split():\n"
        "    sys.modules[name] = None\n"
        "from comm_hooks.launchers.main import app\n"
        f"app({arguments!r})\n"
    )
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)


def test_help_lists_all_commands() -> None:
    done = start("--help", without="torch numpy matplotlib psutil yaml")
    assert done.returncode == 0, done.stderr
    for name, (_, summary) in _COMMANDS.items():
        assert f"  {name}" in done.stdout
        assert summary in done.stdout


@pytest.mark.parametrize("name", _COMMANDS)
def test_every_command_is_there(name: str) -> None:
    done = start(name, "--help", without="torch numpy matplotlib psutil yaml")
    assert done.returncode == 0, done.stderr
    assert f"{name} [OPTIONS]" in done.stdout


@pytest.mark.parametrize("name", _COMMANDS)
def test_options_are_those_of_the_work(name: str) -> None:
    options = importlib.import_module(f"comm_hooks.launchers.commands.{name}")
    work = importlib.import_module(f"comm_hooks.launchers.{name}.run")
    told, taken = (get_type_hints(getattr(module, name)) for module in (options, work))
    assert told == taken


@pytest.mark.parametrize(
    ("arguments", "module", "extra"),
    [
        (("report", "runs.jsonl"), "matplotlib", "compare"),
        (("launch", "train.py"), "yaml", "launch"),
    ],
)
def test_what_a_command_needs_is_named(arguments: tuple[str, str], module: str, extra: str) -> None:
    done = start(*arguments, without=module)
    line = f'comm-hooks {arguments[0]}: needs {module}: pip install "comm-hooks[{extra}]"'
    assert (done.returncode, done.stderr) == (2, f"{line}\n")


def test_names_are_imported_when_they_are_asked_for() -> None:
    for name in comm_hooks.__all__:
        assert getattr(comm_hooks, name).__name__ == name
        assert name in dir(comm_hooks)
    assert comm_hooks.compressors.TopK is comm_hooks.TopK
    with pytest.raises(AttributeError, match="has no attribute 'TopKk'"):
        _ = comm_hooks.TopKk
