"""Ranks that train alone are found, in each of the ways in which launchers count."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from comm_hooks.launchers.preflight import check_world_size, expected_world_size


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
        with pytest.raises(RuntimeError, match=f"^{name} is {started}, but only {met} rank"):
            check_world_size(met, environment)


def test_what_was_started_last_counts() -> None:
    # mpirun -n 4 in a Slurm job of one task, and one of 8 in which srun started a step of 2.
    both = {"SLURM_NTASKS": "1", "OMPI_COMM_WORLD_SIZE": "4"}
    assert expected_world_size(both) == (4, "OMPI_COMM_WORLD_SIZE")
    step = {"SLURM_NTASKS": "8", "SLURM_STEP_NUM_TASKS": "2"}
    assert expected_world_size(step) == (2, "SLURM_STEP_NUM_TASKS")
    assert expected_world_size({}) is None


def test_without_a_process_group_a_process_is_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "SLURM_STEP_NUM_TASKS"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("SLURM_NTASKS", "2")
    with pytest.raises(RuntimeError, match="each process would train alone"):
        check_world_size()
    monkeypatch.setenv("SLURM_NTASKS", "1")
    check_world_size()
