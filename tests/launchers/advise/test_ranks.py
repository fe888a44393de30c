"""What is said when ranks do not find each other."""

import pytest

from comm_hooks.launchers.advise.ranks import joined
from comm_hooks.launchers.endpoint import free_port
from comm_hooks.launchers.place import Place


@pytest.fixture
def closed_port(monkeypatch: pytest.MonkeyPatch) -> str:
    port = str(free_port())
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("MASTER_PORT", port)
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    return port


@pytest.mark.parametrize("rank", [0, 1])
def test_ranks_that_are_out_of_reach(rank: int, closed_port: str) -> None:
    message = rf"rank {rank} of 2 did not reach the others through 127\.0\.0\.1:{closed_port}"
    with (
        pytest.raises(ValueError, match=message) as caught,
        joined(Place("mpirun", rank, 2), "gloo", 1.0),
    ):
        pass
    assert "\n" not in str(caught.value)


def test_a_launcher_that_does_not_say_where_rank_0_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("MASTER_ADDR", raising=False)
    with (
        pytest.raises(ValueError, match="set MASTER_ADDR to its address"),
        joined(Place("mpirun", 1, 4, 1, 2), "gloo", 1.0),
    ):
        pass
