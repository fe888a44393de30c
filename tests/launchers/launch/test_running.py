"""Launches that start real ranks on this machine."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from torch.distributed.elastic.utils.distributed import get_free_port
from typer.testing import CliRunner

from comm_hooks.launchers.main import app
from comm_hooks.launchers.network import Endpoint, wait_for_port
from tests.launchers.launch.commands import dry_run

LAUNCH = [sys.executable, "-m", "comm_hooks.launchers.main", "launch"]
RESTART = str(Path(__file__).with_name("restart_once.py"))
SHOW = str(Path(__file__).with_name("show_rank.py"))
ARGUMENTS = ["--text", "it's a $test", ""]
SECONDS = 200.0


def start(*arguments: str, **variables: str) -> "subprocess.Popen[str]":
    return subprocess.Popen(
        [*LAUNCH, *arguments],
        env={**os.environ, "OMP_NUM_THREADS": "1", **variables},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def finish(processes: Sequence["subprocess.Popen[str]"]) -> list[str]:
    """Wait until all have ended well, and return what they printed."""
    outputs = []
    for process in processes:
        try:
            output, _ = process.communicate(timeout=SECONDS)
        finally:
            process.terminate()
        assert process.returncode == 0, output
        outputs.append(output)
    return outputs


def check_pair(folder: Path, local_ranks: list[str], arguments: list[str]) -> None:
    """Check that two ranks have met, and what each found."""
    for rank, local_rank in enumerate(local_ranks):
        found: dict[str, Any] = json.loads((folder / f"{rank}.json").read_text())
        assert found == {
            "ranks": [0, 1],
            "local_rank": local_rank,
            "arguments": arguments,
            "note": "a b",
        }


def test_one_node(tmp_path: Path) -> None:
    # What is printed can be pasted into a shell.
    (line,) = dry_run("--nproc", "2", "--env", "NOTE=a b", SHOW, str(tmp_path), *ARGUMENTS)
    subprocess.run(["bash", "-c", line], check=True, timeout=SECONDS)
    check_pair(tmp_path, ["0", "1"], ARGUMENTS)


@pytest.mark.slow
def test_two_tasks_of_srun_check_and_train_together(tmp_path: Path) -> None:
    # What srun would start on two nodes, here on one machine.
    common = {"SLURM_STEP_ID": "0", "SLURM_JOB_NODELIST": "localhost", "NOTE": "a b"}
    common |= {"SLURM_NTASKS": "2", "SLURM_NNODES": "2", "SLURM_JOB_ID": "7"}
    head = ["--head", f"localhost:{get_free_port()}"]
    outputs = finish(
        [
            start(
                *("--nproc", "1", "--preflight", *head, SHOW, str(tmp_path), *ARGUMENTS),
                SLURM_PROCID=node,
                SLURM_NODEID=node,
                **common,
            )
            for node in ("0", "1")
        ]
    )
    check_pair(tmp_path, ["0", "0"], ARGUMENTS)
    verdict = "Passed: no problem was found (nodes: 2, links: 2, processes in a gloo group: 2)\n"
    assert [verdict in output for output in outputs] == [True, False]


@pytest.mark.slow
def test_ranks_come_back_on_two_nodes(tmp_path: Path) -> None:
    port = get_free_port()
    head = ["--nnodes", "2", "--head", f"127.0.0.1:{port}"]
    options = ["--nproc", "1", *head, "--max-restarts", "2", RESTART, str(tmp_path)]
    first = start(*options)
    # On one machine the second would not find out by itself which of the two is the head.
    assert wait_for_port(Endpoint("127.0.0.1", port), SECONDS) is None
    finish([first, start(*options)])
    for rank in range(2):
        assert (tmp_path / f"{rank}.txt").read_text().endswith(" of 2 ranks")


@pytest.mark.slow
@pytest.mark.skipif(not shutil.which("mpirun"), reason="there is no mpirun")
def test_mpirun_after_a_preflight(tmp_path: Path) -> None:
    # mpirun passes no empty arguments on.
    mpirun = ["mpirun", "-n", "2"]
    subprocess.run([*mpirun, *LAUNCH[:-1], "preflight"], check=True, timeout=SECONDS)
    launch = [*mpirun, *LAUNCH, "--env", "NOTE=a b", SHOW, str(tmp_path), *ARGUMENTS[:2]]
    subprocess.run(launch, check=True, timeout=SECONDS)
    check_pair(tmp_path, ["0", "1"], ARGUMENTS[:2])


@pytest.mark.slow
def test_a_failed_preflight_ends_the_launch(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    command = ["launch", "--nproc", "1", "--preflight", "--env", "GLOO_SOCKET_IFNAME=ib7"]
    result = CliRunner().invoke(app, [*command, SHOW, str(tmp_path)])
    assert result.exit_code == 1
    assert "torchrun" not in result.stderr
    assert "GLOO_SOCKET_IFNAME is ib7, which is no interface" in capfd.readouterr().err
    assert not list(tmp_path.iterdir())


@pytest.mark.slow
def test_the_exit_code_and_signals_are_those_of_the_program(tmp_path: Path) -> None:
    script = tmp_path / "wait.py"
    script.write_text(
        "import os, signal, sys, time\n"
        "open(sys.argv[1], 'w').write(str(os.getpid()))\n"
        "signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))\n"
        "time.sleep(600)\n"
    )
    told = tmp_path / "pid"
    process = start("--nproc", "1", str(script), str(told))
    deadline = time.monotonic() + SECONDS
    while not (told.exists() and told.read_text()):
        assert time.monotonic() < deadline
        assert process.poll() is None
        time.sleep(0.1)
    process.send_signal(signal.SIGTERM)  # as a scheduler does
    process.communicate(timeout=SECONDS)
    assert process.returncode != 0
    with pytest.raises(ProcessLookupError):
        os.kill(int(told.read_text()), 0)
