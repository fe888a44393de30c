"""The example of the documentation, started by DeepSpeed's own launcher."""

import contextlib
import os
import random
import re
import socket
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

pytest.importorskip("deepspeed", reason="needs DeepSpeed: pip install deepspeed")

HERE = Path(__file__).parent
PAGE = HERE.parents[2] / "docs" / "frameworks" / "deepspeed.md"
FILES = dict(re.findall(r'```\w+ title="([\w.]+)"\n(.*?)```', PAGE.read_text(), flags=re.DOTALL))
ARGUMENTS = ["train.py", "--deepspeed", "--deepspeed_config", "ds_config.json"]


def free_port() -> str:
    # Below those that the system hands out, so that it is still free when the ranks are up.
    for port in random.sample(range(15_000, 30_000), k=100):
        with socket.socket() as listener, contextlib.suppress(OSError):
            listener.bind(("127.0.0.1", port))
            return str(port)
    raise AssertionError("no free port")


def start(folder: Path, options: Sequence[str]) -> subprocess.Popen[str]:
    environment = {
        **os.environ,
        "DS_ACCELERATOR": "cpu",
        "GLOO_SOCKET_IFNAME": "lo",
        "OMP_NUM_THREADS": "1",
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
        "PYTHONPATH": str(HERE / "without_compiler"),
    }
    return subprocess.Popen(
        ["deepspeed", *options, *ARGUMENTS],
        cwd=folder,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def finish(process: subprocess.Popen[str]) -> str:
    try:
        output, _ = process.communicate(timeout=280)
    finally:
        process.kill()
    assert process.returncode == 0, output
    return output


@pytest.mark.slow
def test_two_nodes_started_by_hand(tmp_path: Path) -> None:
    # The page's own command, for one node, runs with all examples.
    assert FILES["run"].split() == ["deepspeed", "--num_gpus", "2", *ARGUMENTS]
    for name in ("train.py", "ds_config.json"):
        (tmp_path / name).write_text(FILES[name])
    (tmp_path / "hosts").write_text("127.0.0.1 slots=1\nlocalhost slots=1\n")
    options = ["--hostfile", "hosts", "--no_ssh", "--master_addr", "127.0.0.1"]
    options += ["--master_port", free_port(), "--node_rank"]
    nodes = [start(tmp_path, [*options, str(node)]) for node in (0, 1)]
    output = "".join([finish(node) for node in nodes])
    (ratio,) = re.findall(r"loss [\d.]+, (\d+) times fewer bytes", output)
    assert int(ratio) > 10
    files = (tmp_path / "checkpoints/global_step20/comm_hooks").iterdir()
    assert sorted(file.name for file in files) == ["rank0.pt", "rank1.pt"]
