"""From facts and figures to lines: each thing that is wrong is named, and where."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from comm_hooks.launchers.preflight.facts import Facts
from comm_hooks.launchers.preflight.links import Link
from comm_hooks.launchers.preflight.problems import (
    describe_difference,
    find_link_problems,
    find_problems,
    slow_links,
)


def node(index: int = 0, **changes: object) -> Facts:
    facts = Facts(
        node=str(index),
        host=f"gpu-{index}",
        address=f"10.0.0.{index + 1}",
        interface="eth0",
        port=40000,
        processes=2,
        versions={"torch": "2.13.0", "deepspeed": "0.19.8"},
        gpus=["H100", "H100"],
    )
    return replace(facts, **changes)  # type: ignore[arg-type]


def cluster(size: int = 4, odd: int = 2, **changes: object) -> list[Facts]:
    """Nodes that are alike, but for one."""
    return [node(i, **(changes if i == odd else {})) for i in range(size)]


@pytest.mark.parametrize(
    ("changes", "line"),
    [
        (
            {"versions": {"torch": "2.12.0", "deepspeed": "0.19.8"}},
            "torch differs: 2.12.0 on node 2 (gpu-2, 10.0.0.3); 2.13.0 on",
        ),
        ({"versions": {"torch": "2.13.0"}}, "deepspeed differs: absent on node 2"),
        ({"gpus": ["H100"], "processes": 1}, "the number of GPUs differs: 1 on node 2"),
        ({"complaints": ["only 3 MB are free in /tmp"]}, "node 2 (gpu-2, 10.0.0.3): only 3 MB"),
        ({"address": "127.0.1.1"}, "node 2 (gpu-2, 127.0.1.1): would be reached at 127.0.1.1"),
        ({"processes": 3}, "3 processes, but PyTorch sees 2 GPUs (H100, H100): lower --nproc"),
    ],
)
def test_an_odd_node_is_named(changes: dict[str, object], line: str) -> None:
    assert find_problems(cluster()) == []
    problems = find_problems(cluster(**changes))
    assert len(problems) == 1
    assert line in problems[0]
    assert "\n" not in problems[0]


def test_without_gpus_any_number_of_processes_is_fine() -> None:
    assert find_problems([node(i, gpus=[], processes=64) for i in range(3)]) == []


def test_two_nodes_on_one_machine_may_use_its_loopback() -> None:
    nodes = [node(i, host="here", address="127.0.0.1") for i in range(2)]
    assert find_problems(nodes) == []


def all_links(size: int, rate: float = 1e9) -> list[Link]:
    pairs = [(i, j) for i in range(size) for j in range(size) if i != j]
    return [Link(i, j, 1e-4, rate) for i, j in pairs]


def complaints(links: list[Link], least: float | None = None) -> list[str]:
    return find_link_problems(cluster(), links, least)


def test_a_slow_link_is_named_with_its_direction() -> None:
    links = all_links(4)
    assert complaints(links) == []
    links[5].bits_per_second = 1e8
    (line,) = complaints(links)
    assert line == (
        "node 1 (gpu-1, 10.0.0.2) -> node 3 (gpu-3, 10.0.0.4): slow: 100 Mbit/s, the median link "
        "has 1.0 Gbit/s"
    )


def test_of_two_directions_the_slower_one_is_slow() -> None:
    links = [Link(0, 1, 1e-4, 1e9), Link(1, 0, 1e-4, 4e8)]
    assert slow_links(cluster(), links, None) == [links[1]]
    assert slow_links(cluster(), [Link(0, 1, 1e-4, 1e9), Link(1, 0, 1e-4, 6e8)], None) == []


def test_what_says_more_about_the_cpu_than_about_the_link_is_not_compared() -> None:
    links = [Link(0, 1, 1e-4, 2e10), Link(1, 0, 1e-4, 5e9)]
    assert slow_links(cluster(), links, None) == []
    assert slow_links(cluster(), links, 6e9) == [links[1]]
    on_one_machine = [node(i, address="127.0.0.1") for i in range(2)]
    assert slow_links(on_one_machine, [Link(0, 1, 1e-4, 1e9), Link(1, 0, 1e-4, 1e8)], None) == []


def test_links_can_be_held_to_a_rate() -> None:
    (line, *more) = complaints(all_links(4, rate=1e8), least=2e8)
    assert len(more) == 11
    assert line.endswith("slow: 100 Mbit/s, needed are 200 Mbit/s")
    assert complaints(all_links(4, rate=3e8), least=2e8) == []


def test_a_link_that_is_closed_says_which_port() -> None:
    links = all_links(4)
    links[0] = Link(0, 1, error="connection refused")
    (line,) = complaints(links)
    assert "gpu-0, 10.0.0.1) -> node 1 (gpu-1, 10.0.0.2): connection refused; port 40000" in line


@given(values=st.lists(st.sampled_from("abc"), min_size=1, max_size=12))
def test_a_difference_names_every_node_of_a_minority(values: list[str]) -> None:
    names = [f"<{index}>" for index in range(len(values))]
    line = describe_difference(names, values)
    assert (line is None) == (len(set(values)) == 1)
    for name, value in zip(names, values, strict=True):
        if line is not None and values.count(value) <= 3:
            assert name in line
    if line is not None:
        assert all(f"{value} on " in line for value in values)
