"""The deepspeed launcher over ssh: variables that it would leave behind arrive on all nodes.

The launcher is the real one; ``ssh`` and ``pdsh`` are scripts that write down what they are told.
"""

import subprocess
from importlib.util import find_spec
from pathlib import Path

import pytest

from comm_hooks.launchers.launch.programs import DEEPSPEED_ENVIRONMENT
from tests.launchers.launch.commands import complaint, dry_run

pytestmark = pytest.mark.skipif(not find_spec("deepspeed"), reason="deepspeed is not installed")


@pytest.fixture(autouse=True)
def hosts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty folder with a hostfile, and a home of the user's own."""
    monkeypatch.chdir(tmp_path)
    home = tmp_path / "home"
    home.mkdir()
    monkeypatch.setenv("HOME", str(home))
    path = tmp_path / "hosts"
    path.write_text("node0 slots=2\nnode1 slots=2\n")
    return path


def test_variables_reach_the_other_nodes(
    tmp_path: Path, hosts: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "home/.deepspeed_env").write_text("FROM_HOME=1\n\n")
    (tmp_path / ".deepspeed_env").write_text("FROM_HERE=2\n")
    monkeypatch.setenv("DS_ACCELERATOR", "cpu")
    monkeypatch.setenv("NOT_FOR_OTHERS", "1")
    lines = dry_run(
        *("--launcher", "deepspeed", "--hostfile", str(hosts), "--head", "10.0.0.1:29400"),
        *("--env", "NOTE=a b", "train.py", "--text", "a b"),
    )
    assert not DEEPSPEED_ENVIRONMENT.exists()

    tools = tmp_path / "tools"
    tools.mkdir()
    (tools / "ssh").write_text("#!/bin/sh\n")
    (tools / "pdsh").write_text(f'#!/bin/sh\nprintf "%s\\n" "$@" > {tmp_path}/told\n')
    for tool in tools.iterdir():
        tool.chmod(0o755)
    monkeypatch.setenv("PATH", str(tools), prepend=":")
    subprocess.run(["bash", "-e", "-c", "\n".join(lines)], check=True, capture_output=True)

    told = (tmp_path / "told").read_text()
    assert "node0,node1" in told
    for export in ("FROM_HOME=1", "FROM_HERE=2", "DS_ACCELERATOR=cpu", 'NOTE="a b"'):
        assert f"export {export};" in told
    assert "NOT_FOR_OTHERS" not in told
    assert "--master_addr=10.0.0.1" in told
    assert "--master_port=29400" in told
    assert told.endswith('train.py\n--text\n"a b"\n')


def test_without_variables_the_users_own_file_counts(hosts: Path) -> None:
    (line,) = dry_run("--hostfile", str(hosts), "--nproc", "1", "-m", "pkg.train")
    assert line.endswith(f"--hostfile {hosts} --num_gpus 1 --module pkg.train")
    assert "DS_ENV_FILE" not in line


def test_values_that_the_launcher_would_mangle_are_refused(hosts: Path) -> None:
    for value in ('say "x"', "$HOME", "`id`"):
        line = complaint("--hostfile", str(hosts), "--env", f"A={value}", "train.py")
        assert "--env A: the deepspeed launcher cannot carry quotes, $" in line


def test_preflight_runs_on_all_nodes_first(hosts: Path) -> None:
    first, second = dry_run("--hostfile", str(hosts), "--preflight", "--config", "d", "train.py")
    assert first.endswith("--module comm_hooks.launchers.preflight --config d")
    assert second.endswith("train.py")
