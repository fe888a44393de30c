"""Who measures with whom, and that what is measured is the link."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.netns import Testbed, why_not
from comm_hooks.launchers.advise.cost_model import Link
from comm_hooks.launchers.advise.links import (
    Measured,
    edges_of,
    joined,
    measure_links,
    network_of,
)
from comm_hooks.launchers.environment import LauncherEnvironment, detect_environment
from comm_hooks.launchers.links import nodes_of
from comm_hooks.launchers.network import free_port


@given(st.lists(st.integers(1, 4), min_size=1, max_size=9))
def test_every_neighbour_is_measured_and_no_rank_twice_at_once(sizes: list[int]) -> None:
    labels = [f"node {node}" for node, size in enumerate(sizes) for _ in range(size)]
    nodes = nodes_of(labels)
    assert [len(node) for node in nodes] == sizes
    assert sorted(rank for node in nodes for rank in node) == list(range(len(labels)))
    turns = edges_of(nodes)
    for turn in turns:
        busy = [rank for one, other, _ in turn for rank in (one, other)]
        assert len(set(busy)) == len(busy)
    edges = [edge for turn in turns for edge in turn]
    inside = {(one, other) for one, other, is_inside in edges if is_inside}
    between = {frozenset((one, other)) for one, other, is_inside in edges if not is_inside}
    assert inside == {(node[0], node[1]) for node in nodes if len(node) > 1}
    first = [node[0] for node in nodes]
    ring = {frozenset(pair) for pair in zip(first, [*first[1:], first[0]], strict=True)}
    assert between == {pair for pair in ring if len(pair) == 2}
    assert len(edges) == len(inside) + len(between)


def test_the_network_is_as_slow_as_its_slowest_links() -> None:
    measured = [
        Measured(0, 2, False, Link(100.0, 0.1)),
        Measured(2, 0, False, Link(50.0, 0.05)),
        Measured(0, 1, True, Link(1000.0, 0.01)),
        Measured(1, 0, True, Link(2000.0, 0.02)),
    ]
    network = network_of(measured, [[0, 1], [2]], "gloo")
    assert network.between == Link(50.0, 0.1)
    assert network.inside == Link(1000.0, 0.02)
    assert (network.ranks, network.ranks_per_node) == (3, 2)
    assert network_of(measured[:2], [[0], [2]], "gloo").inside is None
    # One node: its links are the only ones.
    assert network_of(measured[2:], [[0, 1]], "gloo").ring == Link(1000.0, 0.02)


def _measure() -> tuple[list[Measured], list[list[int]]]:
    return measure_links(torch.device("cpu"))


def test_all_ranks_learn_the_same(ranks_of: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    (first, nodes), *others = ranks_of(3).run(_measure)
    assert all(other == (first, nodes) for other in others)
    assert nodes == [[0, 1, 2]]
    assert [(m.source, m.target, m.inside) for m in first] == [(0, 1, True), (1, 0, True)]
    assert all(m.link.bandwidth > 0 and m.link.latency > 0 for m in first)


def print_links() -> None:
    """Be one rank in a bed."""
    process = detect_environment()
    with joined(process, "gloo", 60.0):
        measured, _ = measure_links(torch.device("cpu"))
    if process.rank == 0:
        print(json.dumps({m.source: 8e-6 * m.link.bandwidth for m in measured if not m.inside}))


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
