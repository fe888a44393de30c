"""The right command for what is there."""

import shlex
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from comm_hooks.launchers.launch import plan, programs
from comm_hooks.launchers.launch.steps import Command
from comm_hooks.launchers.network import Route
from tests.launchers.launch.commands import complaint, dry_run, split

OWN_STORES = "TORCH_DISABLE_SHARE_RDZV_TCP_STORE"
STEP = {"SLURM_PROCID": "1", "SLURM_STEP_ID": "0", "SLURM_NODEID": "1", "SLURM_JOB_ID": "20007"}
TWO_TASKS = {**STEP, "SLURM_NNODES": "2", "SLURM_NTASKS": "2", "SLURM_JOB_NODELIST": "localhost"}


def test_one_node_is_torchrun_alone() -> None:
    (line,) = dry_run("--nproc", "2", "--max-restarts", "3", "train.py", "--lr", "1e-3")
    variables, arguments = split(line)
    assert arguments == [
        *(*programs._TORCHRUN[:1], "--standalone", "--nproc-per-node", "2"),
        *("--max-restarts", "3", "train.py", "--lr", "1e-3"),
    ]
    assert variables == {"GLOO_SOCKET_IFNAME": "lo", OWN_STORES: "1"}


def test_ranks_that_may_start_anew_get_a_store_for_each_attempt(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    head = ["--head", "127.0.0.1:29400"]
    for options, needed in (
        (["--max-restarts", "1"], True),
        (["--nnodes", "2", "--max-restarts", "1", *head], True),
        (["--nnodes", "1:2", *head], True),
        (["--nnodes", "2", *head], False),
        ([], False),
    ):
        (line,) = dry_run("--nproc", "2", *options, "train.py")
        assert split(line)[0].get(OWN_STORES) == ("1" if needed else None)
    own = dry_run("--nproc", "2", "--max-restarts", "1", "--env", f"{OWN_STORES}=0", "train.py")
    assert split(own[0])[0][OWN_STORES] == "0"
    monkeypatch.setenv(OWN_STORES, "0")
    assert OWN_STORES not in split(dry_run("--nproc", "2", "--max-restarts", "1", "train.py")[0])[0]


def test_what_follows_the_script_is_the_scripts_own() -> None:
    (line,) = dry_run("--nproc", "1", "-m", "pkg.train", "--nproc", "7", "--", "--dry-run")
    assert split(line)[1][-6:] == ["-m", "pkg.train", "--nproc", "7", "--", "--dry-run"]


def test_without_a_number_there_is_one_process_per_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.device_count", lambda: 4)
    (line,) = dry_run("train.py")
    assert "--nproc-per-node 4" in line


def test_a_fixed_node_has_a_static_rendezvous_and_the_interface_to_the_head() -> None:
    command = ["--nproc", "2", "--nnodes", "4", "--head", "127.0.0.1:29400", "--node-rank", "3"]
    (line,) = dry_run(*command, "train.py")
    variables, arguments = split(line)
    assert variables == {"GLOO_SOCKET_IFNAME": "lo", "NCCL_SOCKET_IFNAME": "lo"}
    assert "--nnodes 4 --node-rank 3 --master-addr 127.0.0.1 --master-port 29400" in line
    assert "rdzv" not in line
    assert arguments[-1] == "train.py"


@pytest.mark.parametrize("is_head", [True, False])
def test_nodes_without_a_number_are_told_who_hosts_and_where_they_are(
    is_head: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    def elsewhere(host: str, interface: str | None) -> Route:
        return Route("ib0", "10.0.0.9", "10.0.0.9" if is_head else "10.0.0.1", is_head)

    monkeypatch.setattr(plan, "find_route", elsewhere)
    (line,) = dry_run("--nproc", "1", "--nnodes", "2:4", "--head", "node0", "train.py")
    variables, _ = split(line)
    interfaces = {"GLOO_SOCKET_IFNAME": "ib0", "NCCL_SOCKET_IFNAME": "ib0"}
    assert variables == {**interfaces, OWN_STORES: "1"}
    assert "--nnodes 2:4" in line
    endpoint = "10.0.0.9:29500" if is_head else "10.0.0.1:29500"
    assert f"--rdzv-backend c10d --rdzv-endpoint {endpoint}" in line
    assert f"--rdzv-conf is_host={int(is_head)} --local-addr 10.0.0.9" in line


def test_an_interface_of_the_users_environment_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    command = ["--nproc", "1", "--nnodes", "2", "--node-rank", "0", "--head", "127.0.0.1"]
    assert "GLOO" not in dry_run(*command, "train.py")[0]
    assert "GLOO_SOCKET_IFNAME=lo" in dry_run(*command, "--interface", "lo", "train.py")[0]


def test_an_interface_that_leads_nowhere_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    monkeypatch.setattr(
        plan, "find_route", lambda *rest: Route("eth0", "10.0.0.2", "10.0.0.1", False)
    )
    command = ["--nproc", "1", "--nnodes", "2", "--head", "node0"]
    assert "GLOO_SOCKET_IFNAME is lo here, which leads to no other" in complaint(*command, "t.py")
    assert "IFNAME=eth0" in dry_run(*command, "--interface", "eth0", "t.py")[0]


def test_a_task_of_srun_takes_its_place_from_slurm(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in TWO_TASKS.items():
        monkeypatch.setenv(name, value)
    (line,) = dry_run("--nproc", "8", "train.py")
    # A port of the job's own: 20000 + 20007 % 20000.
    assert "--nnodes 2 --node-rank 1 --master-addr 127.0.0.1 --master-port 20007" in line
    (line,) = dry_run("--nproc", "8", "--max-restarts", "1", "train.py")
    assert "--rdzv-backend c10d" in line
    assert "--rdzv-id 20007" in line


def test_a_slurm_allocation_is_filled_by_srun(monkeypatch: pytest.MonkeyPatch) -> None:
    variables = {"SLURM_JOB_ID": "7", "SLURM_NNODES": "2", "SLURM_NTASKS": "2"}
    # A batch script's, and an interactive shell's, which is a step of its own kind.
    for more in ({"SLURM_PROCID": "0"}, {"SLURM_PROCID": "0", "SLURM_STEP_ID": "4294967290"}):
        with monkeypatch.context() as patch:
            for name, value in {**variables, **more}.items():
                patch.setenv(name, value)
            (line,) = dry_run("--nproc", "8", "--env", "A=b c", "--module", "train", "--lr", "1")
        arguments = split(line)[1]
        assert arguments[:4] == ["srun", "--nodes=2", "--ntasks=2", "--ntasks-per-node=1"]
        launch = arguments[arguments.index("launch") :]
        assert launch == (
            ["launch", "--env", "A=b c", "--nproc", "8", "--module", "train", "--lr", "1"]
        )


@pytest.mark.parametrize(
    "environment",
    [
        {"PMI_RANK": "3", "PMI_SIZE": "4", "MPI_LOCALRANKID": "1", "MPI_LOCALNRANKS": "2"},
        {
            "OMPI_COMM_WORLD_RANK": "3",
            "OMPI_COMM_WORLD_SIZE": "4",
            "OMPI_COMM_WORLD_LOCAL_RANK": "1",
            "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
            **TWO_TASKS,  # mpirun may have been started by Slurm
        },
    ],
)
def test_a_rank_of_mpirun_becomes_the_script(
    environment: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    (line,) = dry_run("--head", "127.0.0.1:29400", "--env", "A=b", "train.py", "-x")
    variables, arguments = split(line)
    assert arguments == [sys.executable, "train.py", "-x"]
    expected = {"RANK": "3", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2"}
    expected |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29400", "A": "b"}
    assert variables == expected | {"GLOO_SOCKET_IFNAME": "lo", "NCCL_SOCKET_IFNAME": "lo"}


def test_preflight_comes_first_and_meets_where_the_job_does() -> None:
    command = ["--nproc", "2", "--nnodes", "2", "--head", "127.0.0.1:29400", "--node-rank", "1"]
    first, second = dry_run(*command, "--preflight", "train.py")
    arguments = split(first)[1]
    assert arguments[arguments.index("preflight") :] == [
        *("preflight", "--head", "127.0.0.1:29400", "--nnodes", "2", "--node-rank", "1"),
        *("--nproc", "2"),
    ]
    assert second == dry_run(*command, "train.py")[0]


@given(
    arguments=st.lists(st.text(st.characters(exclude_characters="\0", codec="utf-8")), max_size=4),
    value=st.text(st.characters(exclude_characters="\0", codec="utf-8")),
)
def test_what_is_printed_is_what_is_run(arguments: list[str], value: str) -> None:
    command = Command(("prog", *arguments), {"A": value})
    words = shlex.split(str(command))
    assert words == [f"A={value}", "prog", *arguments]
