"""Bad input gets one line and exit code 2, before anything is run or written."""

import socket
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed.elastic.utils.distributed import get_free_port
from typer.testing import CliRunner

from comm_hooks.launchers.launch.job import Job, parse_nodes
from comm_hooks.launchers.launch.steps import Command
from comm_hooks.launchers.main import app
from comm_hooks.launchers.network import Endpoint, parse_endpoint, wait_for_port
from tests.launchers.launch.commands import complaint

HEAD = ["--head", "127.0.0.1"]
IN_RANK = {"RANK": "1", "WORLD_SIZE": "4"}
STEP = {"SLURM_PROCID": "1", "SLURM_STEP_ID": "0", "SLURM_JOB_ID": "7", "SLURM_NNODES": "2"}
MPI = {"PMI_RANK": "3", "PMI_SIZE": "4", "MPI_LOCALRANKID": "1", "MPI_LOCALNRANKS": "2"}


@pytest.fixture(autouse=True)
def _nothing_may_be_run(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    def refuse(*arguments: object) -> None:
        raise AssertionError("something was run")

    for method in ("run", "become"):
        monkeypatch.setattr(Command, method, refuse)
    monkeypatch.chdir(tmp_path)
    yield
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--nproc", "0"], "--nproc must be at least 1, got 0"),
        (["--nnodes", "two"], "--nnodes two: needs a number of nodes"),
        (["--nnodes", "4:2"], "MIN:MAX with MIN <= MAX"),
        (["--nnodes", "0"], "needs a number of nodes"),
        (["--nnodes", "2"], "--nnodes 2 needs --head HOST[:PORT]"),
        (["--nnodes", "2", "--node-rank", "2", *HEAD], "must lie between 0 and 1 with 2 nodes"),
        (["--nnodes", "1:2", "--node-rank", "0", *HEAD], "fixes the order of nodes"),
        (["--nnodes", "2", "--node-rank", "0", "--max-restarts", "1", *HEAD], "--max-restarts"),
        (["--max-restarts", "-1"], "--max-restarts must be at least 0"),
        (["--head", "127.0.0.1:99999"], "the port must lie between 1 and 65535"),
        (["--head", "a b"], "needs HOST or HOST:PORT"),
        (["--nnodes", "2", "--head", "no-such-host.invalid"], "cannot resolve that name"),
        (["--nnodes", "2", *HEAD, "--interface", "eth77"], "no such interface with an address"),
        (["--env", "A"], "--env 'A': needs NAME=VALUE"),
        (["--env", "1A=b"], "needs NAME=VALUE"),
        (["--nnodes", "1:2", *HEAD, "--preflight"], "--preflight needs a fixed number of nodes"),
    ],
)
def test_a_bad_option_is_refused(arguments: list[str], message: str) -> None:
    assert message in complaint(*arguments, "train.py")


@pytest.mark.parametrize(
    "launcher",
    [
        ["--preflight", "--nproc", "2"],
        ["--nnodes", "2", "--node-rank", "1", *HEAD],
    ],
    ids=" ".join,
)
def test_a_script_that_is_not_there_is_told_before_any_rank_is_started(
    launcher: list[str], tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    here = tmp_path_factory.mktemp("scripts")
    (here / "folder").mkdir()
    monkeypatch.chdir(here)
    assert f"train.py: there is no such file here ({here})" in complaint(*launcher, "train.py")
    assert "folder: is a folder without __main__.py" in complaint(*launcher, "folder")
    (here / "folder/__main__.py").touch()
    Job(("folder",)).require_target()


def test_a_script_for_other_machines_need_not_be_on_this_one() -> None:
    environment = {"SLURM_JOB_ID": "7", "SLURM_NNODES": "2"}
    result = CliRunner().invoke(app, ["launch", "train.py"], env=environment)
    assert str(result.exception) == "something was run"


@pytest.mark.parametrize(
    ("environment", "arguments", "message"),
    [
        (IN_RANK, [], "this is rank 1 of 4 already"),
        ({**STEP, "SLURM_NTASKS": "16"}, [], "srun started 8 tasks on this node"),
        ({**STEP, "SLURM_NTASKS": "2"}, [], "give --head"),  # and no node list
        (MPI, [], "give --head HOST:PORT, the machine of rank 0"),
        (MPI, ["--preflight"], "--preflight must come before the ranks"),
    ],
)
def test_a_bad_place_is_refused(
    environment: dict[str, str], arguments: list[str], message: str
) -> None:
    assert message in complaint("--nproc", "1", *arguments, "train.py", environment=environment)


def test_node_0_must_be_on_the_head() -> None:
    # An address for documentation: nobody's.
    line = complaint(
        *("--nproc", "1", "--nnodes", "2", "--node-rank", "0", "--head", "203.0.113.5", "train.py")
    )
    assert "must run on the head" in line or "no route from this machine" in line


def test_a_name_that_is_the_machines_own_loopback_is_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # As Debian has it in /etc/hosts for the machine's own name.
    answer = [(socket.AF_INET, socket.SOCK_STREAM, 6, "", ("127.0.1.1", 0))]
    monkeypatch.setattr(socket, "getaddrinfo", lambda *rest, **more: answer)
    line = complaint("--nproc", "1", "--nnodes", "2", "--head", "node0", "train.py")
    assert "--head node0 is 127.0.1.1 on this machine, where no other node can reach it" in line


def test_a_head_that_does_not_listen_is_named_before_torchrun_waits_for_it() -> None:
    port = get_free_port()
    command = ["--nproc", "1", "--nnodes", "2", "--node-rank", "1", "--wait", "0"]
    command += ["--head", f"127.0.0.1:{port}", "-m", "json.tool"]
    result = CliRunner().invoke(app, ["launch", *command])
    shown, reason = result.stderr.splitlines()
    assert "torchrun" in shown or "torch.distributed.run" in shown
    assert result.exit_code == 2
    assert f"cannot reach the head at 127.0.0.1:{port} from 127.0.0.1 (lo): connection" in reason


def test_waiting_for_a_port_ends_when_somebody_listens() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        assert wait_for_port(Endpoint("127.0.0.1", server.getsockname()[1]), 10) is None
        port = server.getsockname()[1]
    assert "refused" in (wait_for_port(Endpoint("127.0.0.1", port), 0.2) or "")
    assert "resolve" in (wait_for_port(Endpoint("no-such-host.invalid", port), 0.2) or "")


@given(host=st.from_regex(r"[A-Za-z][\w-]{0,20}", fullmatch=True), port=st.integers(1, 65535))
def test_endpoints_are_read_as_they_are_written(host: str, port: int) -> None:
    assert parse_endpoint(str(Endpoint(host, port))) == Endpoint(host, port)
    assert parse_endpoint(str(Endpoint("fd00::2", port))) == Endpoint("fd00::2", port)
    assert parse_endpoint("fd00::2") == Endpoint("fd00::2")


@given(fewest=st.integers(1, 999), more=st.integers(0, 9))
def test_node_ranges_are_read_as_they_are_written(fewest: int, more: int) -> None:
    assert parse_nodes(f"{fewest}:{fewest + more}") == (fewest, fewest + more)
    assert parse_nodes(str(fewest)) == (fewest, fewest)
