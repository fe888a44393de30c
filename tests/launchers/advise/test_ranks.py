"""Where a process stands, by what its launcher tells, and what is said when nobody answers."""

import socket

import pytest

from comm_hooks.launchers.advise.ranks import Place, find_place, joined


@pytest.mark.parametrize(
    ("environment", "place"),
    [
        ({}, Place()),
        ({"RANK": "0"}, Place()),  # half of what a launcher sets
        ({"RANK": "3", "WORLD_SIZE": "4"}, Place(3, 4)),
        (
            {
                "RANK": "3",
                "WORLD_SIZE": "4",
                "LOCAL_RANK": "1",
                "LOCAL_WORLD_SIZE": "2",
                "GROUP_RANK": "1",
            },
            Place(3, 4, 1, 2, "1"),
        ),
        (
            {
                "OMPI_COMM_WORLD_RANK": "3",
                "OMPI_COMM_WORLD_SIZE": "4",
                "OMPI_COMM_WORLD_LOCAL_RANK": "1",
                "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
            },
            Place(3, 4, 1, 2),
        ),
        (
            {"PMI_RANK": "1", "PMI_SIZE": "2", "MPI_LOCALRANKID": "1", "MPI_LOCALNRANKS": "2"},
            Place(1, 2, 1, 2),
        ),
        (
            {"SLURM_PROCID": "5", "SLURM_NTASKS": "8", "SLURM_LOCALID": "1", "SLURM_NODEID": "2"},
            Place(5, 8, 1, 1, "2"),
        ),
        # torchrun inside of a Slurm job: the inner launcher counts.
        (
            {"RANK": "1", "WORLD_SIZE": "2", "SLURM_PROCID": "0", "SLURM_NTASKS": "1"},
            Place(1, 2),
        ),
    ],
)
def test_launchers(environment: dict[str, str], place: Place) -> None:
    assert find_place(environment) == place


@pytest.mark.parametrize(("rank", "size"), [("2", "2"), ("-1", "2"), ("0", "0")])
def test_launchers_that_contradict_themselves(rank: str, size: str) -> None:
    with pytest.raises(ValueError, match=f"PMI_RANK={rank} and PMI_SIZE={size}"):
        find_place({"PMI_RANK": rank, "PMI_SIZE": size})


def test_numbers_that_are_none() -> None:
    with pytest.raises(ValueError, match="RANK='one' in the environment is not a number"):
        find_place({"RANK": "one", "WORLD_SIZE": "2"})


@pytest.fixture
def closed_port(monkeypatch: pytest.MonkeyPatch) -> str:
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        port = str(unused.getsockname()[1])
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("MASTER_PORT", port)
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    return port


@pytest.mark.parametrize("rank", [0, 1])
def test_ranks_that_are_out_of_reach(rank: int, closed_port: str) -> None:
    message = rf"rank {rank} of 2 did not reach the others through 127\.0\.0\.1:{closed_port}"
    with pytest.raises(ValueError, match=message) as caught, joined(Place(rank, 2), "gloo", 1.0):
        pass
    assert "\n" not in str(caught.value)


def test_a_launcher_that_does_not_say_where_rank_0_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("MASTER_ADDR", raising=False)
    with (
        pytest.raises(ValueError, match="set MASTER_ADDR to its address"),
        joined(Place(1, 4, 1, 2), "gloo", 1.0),
    ):
        pass
