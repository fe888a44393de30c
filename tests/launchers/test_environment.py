"""Where a process stands among others, by what torchrun, mpirun and srun tell it."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from comm_hooks.launchers.environment import (
    LauncherEnvironment,
    check_world_size,
    detect_environment,
)

_PMI = {"PMI_RANK": "3", "PMI_SIZE": "8"}
_MPIRUN = {**_PMI, "MPI_LOCALRANKID": "1", "MPI_LOCALNRANKS": "2", "PMI_HOSTNAME": "a"}
_OPEN_MPI = {
    "OMPI_COMM_WORLD_RANK": "3",
    "OMPI_COMM_WORLD_SIZE": "4",
    "OMPI_COMM_WORLD_LOCAL_RANK": "1",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
}
# A batch script of Slurm, and the last task on the first of two nodes of a step.
_BATCH = {"SLURM_JOB_ID": "7", "SLURM_NTASKS": "8", "SLURM_NNODES": "2", "SLURM_PROCID": "0"}
_STEP = {
    **_BATCH,
    "SLURM_STEP_ID": "0",
    "SLURM_PROCID": "3",
    "SLURM_LOCALID": "3",
    "SLURM_NODEID": "0",
}


@pytest.mark.parametrize(
    ("environment", "expected"),
    [
        ({}, LauncherEnvironment()),
        ({"RANK": "0"}, LauncherEnvironment()),  # half of what a launcher sets
        ({"RANK": "3", "WORLD_SIZE": "4"}, LauncherEnvironment("torchrun", 3, 4, 0, 4)),
        (
            {
                "RANK": "3",
                "WORLD_SIZE": "4",
                "LOCAL_RANK": "1",
                "LOCAL_WORLD_SIZE": "2",
                "GROUP_RANK": "1",
            },
            LauncherEnvironment("torchrun", 3, 4, 1, 2, "1"),
        ),
        (_OPEN_MPI, LauncherEnvironment("mpirun", 3, 4, 1, 2)),
        (_MPIRUN, LauncherEnvironment("mpirun", 3, 8, 1, 2, "a")),
        (_PMI, LauncherEnvironment("mpirun", 3, 8, 0, 1)),  # how many share the node is not told
        (_BATCH, LauncherEnvironment()),
        ({**_BATCH, "SLURM_STEP_ID": "4294967290"}, LauncherEnvironment()),  # an interactive shell
        (_STEP, LauncherEnvironment("srun", 3, 8, 3, 4, "0")),
        ({**_STEP, "SLURM_STEP_NUM_TASKS": "4"}, LauncherEnvironment("srun", 3, 4, 3, 2, "0")),
        # srun --mpi=pmi2: PMI's variables have no local rank.
        ({**_STEP, **_PMI}, LauncherEnvironment("srun", 3, 8, 3, 4, "0")),
        # The inner launcher counts.
        ({**_STEP, **_MPIRUN}, LauncherEnvironment("mpirun", 3, 8, 1, 2, "a")),
        ({**_STEP, **_OPEN_MPI}, LauncherEnvironment("mpirun", 3, 4, 1, 2)),
        ({**_STEP, "RANK": "1", "WORLD_SIZE": "2"}, LauncherEnvironment("torchrun", 1, 2, 0, 2)),
    ],
)
def test_launchers(environment: dict[str, str], expected: LauncherEnvironment) -> None:
    assert detect_environment(environment) == expected


@pytest.mark.parametrize(("rank", "size"), [("2", "2"), ("-1", "2"), ("0", "0")])
def test_launchers_that_contradict_themselves(rank: str, size: str) -> None:
    with pytest.raises(ValueError, match=f"PMI_RANK={rank} and PMI_SIZE={size}"):
        detect_environment({"PMI_RANK": rank, "PMI_SIZE": size})


def test_numbers_that_are_none() -> None:
    with pytest.raises(ValueError, match="RANK='one' in the environment is not a number"):
        detect_environment({"RANK": "one", "WORLD_SIZE": "2"})


@given(
    name=st.sampled_from(
        ["SLURM_NTASKS", "SLURM_STEP_NUM_TASKS", "PMI_SIZE", "OMPI_COMM_WORLD_SIZE"]
    ),
    started=st.integers(1, 64),
    met=st.integers(1, 64),
)
def test_fewer_ranks_than_were_started_are_an_error(name: str, started: int, met: int) -> None:
    environment = {name: str(started)}
    if met >= started:
        check_world_size(met, environment)
    else:
        with pytest.raises(RuntimeError, match=f"^{name} is {started}, but .* only {met} rank"):
            check_world_size(met, environment)


def test_what_was_started_last_counts() -> None:
    # mpirun -n 4 in a Slurm job of one task, and one of 8 in which srun started a step of 2.
    both = {"SLURM_NTASKS": "1", "OMPI_COMM_WORLD_SIZE": "4"}
    with pytest.raises(RuntimeError, match=r"^OMPI_COMM_WORLD_SIZE is 4"):
        check_world_size(1, both)
    step = {"SLURM_NTASKS": "8", "SLURM_STEP_NUM_TASKS": "2"}
    check_world_size(2, step)
    check_world_size(1, {})


def test_without_a_process_group_a_process_is_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "SLURM_STEP_NUM_TASKS"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("SLURM_NTASKS", "2")
    with pytest.raises(RuntimeError, match="each process would train alone"):
        check_world_size()
    monkeypatch.setenv("SLURM_NTASKS", "1")
    check_world_size()
