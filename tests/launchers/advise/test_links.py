"""Who measures with whom, and that what is measured is the link."""

import json
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from benchmarks.netns import Testbed, why_not
from comm_hooks.launchers.advise.cost_model import Network
from comm_hooks.launchers.advise.links import Measured, joined, measure_links
from comm_hooks.launchers.environment import LauncherEnvironment, detect_environment
from comm_hooks.launchers.network import free_port


def _measure() -> tuple[Network, list[Measured]]:
    return measure_links(torch.device("cpu"), "gloo")


def test_all_ranks_learn_the_same(ranks_of: Any) -> None:
    (network, links), *others = ranks_of(3).run(_measure)
    assert all(other == (network, links) for other in others)
    assert (network.ranks, network.ranks_per_node) == (3, 3)
    assert [(m.source, m.target) for m in links] == [(0, 1), (1, 0)]
    assert network.link.bandwidth == min(m.link.bandwidth for m in links) > 0
    assert network.link.latency == max(m.link.latency for m in links) > 0


def _node_of_rank() -> tuple[Network, list[tuple[int, int]]]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(socket, "gethostname", lambda: "ab"[dist.get_rank() // 2])
        network, links = measure_links(torch.device("cpu"), "gloo")
    return network, [(m.source, m.target) for m in links]


def test_the_first_ranks_of_nodes_measure_the_links_between_them(ranks_of: Any) -> None:
    (network, pairs), *_ = ranks_of(3).run(_node_of_rank)
    assert (network.ranks, network.ranks_per_node) == (3, 2)
    assert pairs == [(0, 2), (2, 0)]


def print_links() -> None:
    """Be one rank in a bed."""
    process = detect_environment()
    with joined(process, "gloo", 60.0):
        _, measured = measure_links(torch.device("cpu"), "gloo")
    if process.rank == 0:
        print(json.dumps({m.source: 8e-6 * m.link.bandwidth for m in measured}))


@pytest.mark.slow
@pytest.mark.skipif(bool(why_not()), reason=why_not() or "")
def test_each_direction_is_measured_by_itself() -> None:
    script = "from tests.launchers.advise.test_links import print_links; print_links()"
    with Testbed(2) as bed:
        bed.set_rate("10mbit", ranks=[0], direction="up")
        bed.set_rate("40mbit", ranks=[1], direction="up")
        options: dict[str, Any] = {"cwd": Path(__file__).parents[3]}
        ranks = [
            bed.start(rank, [sys.executable, "-c", script], stdout=subprocess.PIPE, **options)
            for rank in range(2)
        ]
        assert bed.wait(ranks, timeout=120) == [0, 0]
        assert ranks[0].stdout
        megabits = json.loads(ranks[0].stdout.read())
    # Headers take 4 %, and a machine that is busy may take more.
    assert 5 < megabits["0"] < 10
    assert 20 < megabits["1"] < 40


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
        joined(LauncherEnvironment("mpirun", rank, 2), "gloo", 1.0),
    ):
        pass
    assert "\n" not in str(caught.value)


def test_a_launcher_that_does_not_say_where_rank_0_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("MASTER_ADDR", raising=False)
    with (
        pytest.raises(ValueError, match="set MASTER_ADDR to its address"),
        joined(LauncherEnvironment("mpirun", 1, 4, 1, 2), "gloo", 1.0),
    ):
        pass
