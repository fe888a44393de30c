"""The forked torchrun does what the real one does: ranks, arguments, failures, and its end."""

import subprocess
import time
from pathlib import Path

import psutil
import pytest

from tests.torchrun import Torchrun

SCRIPT = """
import os, sys, time
from pathlib import Path
import torch.distributed as dist

assert __name__ == "__main__"
dist.init_process_group("gloo")
everybody = [None] * dist.get_world_size()
dist.all_gather_object(everybody, (os.getpid(), os.environ["NOTE"], os.getcwd(), sys.argv))
text = sys.stdin.read() if dist.get_rank() == 0 else None
if dist.get_rank() == 1:
    Path("told").write_text(repr(everybody))
    if "fail" in sys.argv:
        raise OSError("broken on rank 1")
    time.sleep(600 if "wait" in sys.argv else 0)
else:
    print("read", text)
"""


def start(torchrun: Torchrun, folder: Path, *arguments: str) -> "subprocess.Popen[str]":
    (folder / "script.py").write_text(SCRIPT)
    return subprocess.Popen(
        [torchrun.command, "--standalone", "--nproc-per-node", "2", *arguments],
        cwd=folder,
        env={"NOTE": "a b", "GLOO_SOCKET_IFNAME": "lo", "PATH": "/usr/bin:/bin"},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def is_running(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


@pytest.mark.parametrize("target", [["script.py"], ["-m", "script"]])
def test_ranks_get_what_the_command_got(
    torchrun: Torchrun, tmp_path: Path, target: list[str]
) -> None:
    process = start(torchrun, tmp_path, *target, "--text", "a b")
    output, _ = process.communicate("typed", timeout=200)
    assert process.returncode == 0, output
    assert "read typed" in output
    ranks = eval((tmp_path / "told").read_text())
    assert len({pid for pid, *_ in ranks}) == 2
    for _, note, folder, arguments in ranks:
        assert (note, folder, arguments[1:]) == ("a b", str(tmp_path), ["--text", "a b"])


def test_a_rank_that_fails_fails_the_command(torchrun: Torchrun, tmp_path: Path) -> None:
    process = start(torchrun, tmp_path, "script.py", "fail")
    output, _ = process.communicate("", timeout=200)
    assert process.returncode == 1
    assert "broken on rank 1" in output


def test_the_ranks_end_with_the_command(torchrun: Torchrun, tmp_path: Path) -> None:
    process = start(torchrun, tmp_path, "script.py", "wait")
    deadline = time.monotonic() + 200
    while not ((tmp_path / "told").exists() and (tmp_path / "told").read_text()):
        assert time.monotonic() < deadline
        time.sleep(0.05)
    ranks = [pid for pid, *_ in eval((tmp_path / "told").read_text())]
    assert is_running(ranks[1])
    process.terminate()
    process.communicate(timeout=200)
    while any(map(is_running, ranks)):
        assert time.monotonic() < deadline
        time.sleep(0.05)
