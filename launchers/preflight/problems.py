"""The problems in the nodes' facts and measurements: one line each, with the node's name."""

import statistics
from collections.abc import Sequence

from comm_hooks.launchers.network import is_loopback
from comm_hooks.launchers.preflight.facts import Facts
from comm_hooks.launchers.preflight.links import Link
from comm_hooks.launchers.rates import format_rate

_SLOW = 0.5
"""The share of the median link's rate below which a link is slow."""

_FAST = 4e9
"""Bits per second above which one connection of one process measures the CPU, not the link."""

_LISTED = 3


def name_node(index: int, facts: Facts) -> str:
    """Return a node's index, host name and address as text for messages."""
    where = f", {facts.address}" if facts.address else ""
    return f"node {index} ({facts.host}{where})"


def find_problems(nodes: Sequence[Facts]) -> list[str]:
    """Return the problems of nodes, such as different versions, one line each."""
    names = [name_node(index, facts) for index, facts in enumerate(nodes)]
    problems = [
        f"{name}: {complaint}"
        for name, facts in zip(names, nodes, strict=True)
        for complaint in facts.complaints
    ]
    for key in dict.fromkeys(key for facts in nodes for key in facts.versions):
        values = [facts.versions.get(key, "absent") for facts in nodes]
        if difference := describe_difference(names, values):
            problems.append(f"{key} differs: {difference}")
    if difference := describe_difference(names, [str(len(facts.gpus)) for facts in nodes]):
        problems.append(f"the number of GPUs differs: {difference}")
    hosts = {facts.host for facts in nodes}
    for name, facts in zip(names, nodes, strict=True):
        # Where no node has one, training is meant for CPUs.
        if facts.gpus and facts.processes is not None and facts.processes > len(facts.gpus):
            problems.append(
                f"{name}: {facts.processes} processes, but PyTorch sees {len(facts.gpus)} GPUs "
                f"({', '.join(facts.gpus)}): lower --nproc, or look at CUDA_VISIBLE_DEVICES"
            )
        if len(hosts) > 1 and is_loopback(facts.address):
            problems.append(
                f"{name}: would be reached at {facts.address}, which is every machine's own: give "
                "--head as an address in the nodes' network"
            )
    return problems


def find_link_problems(
    nodes: Sequence[Facts], links: Sequence[Link], least: float | None
) -> list[str]:
    """Return the problems of links, one line each: those that failed, and slow ones.

    Args:
        nodes: the facts about each node.
        links: the measured links.
        least: the bits per second that every link must carry; None to compare links only.
    """
    names = [name_node(index, facts) for index, facts in enumerate(nodes)]
    problems = []
    slow = slow_links(nodes, links, least)
    for link in links:
        way = f"{names[link.source]} -> {names[link.target]}"
        if link.error:
            problems.append(
                f"{way}: {link.error}; port {nodes[link.target].port} was tried, training uses "
                "any: open all ports between the nodes"
            )
        elif link in slow:
            reference = least or median_rate(links)
            needed = "needed are" if least else "the median link has"
            problems.append(
                f"{way}: slow: {format_rate(link.bits_per_second or 0)}, {needed} "
                f"{format_rate(reference)}"
            )
    return problems


def slow_links(nodes: Sequence[Facts], links: Sequence[Link], least: float | None) -> list[Link]:
    """Return the links with a rate below ``least``, or if None below half of the median rate.

    Links between two nodes on one machine are never slow.
    """
    limit = least if least is not None else min(_FAST, _SLOW * median_rate(links))
    return [
        link
        for link in links
        if link.bits_per_second is not None
        and link.bits_per_second < limit
        and nodes[link.source].address != nodes[link.target].address
    ]


def median_rate(links: Sequence[Link]) -> float:
    """Return the median of the links' bits per second; of two links the higher rate."""
    rates = [link.bits_per_second for link in links if link.bits_per_second]
    return statistics.median_high(rates) if rates else 0.0


def describe_difference(names: Sequence[str], values: Sequence[str]) -> str | None:
    """Return the values and their nodes in words, or None if all values are the same."""
    groups: dict[str, list[str]] = {}
    for name, value in zip(names, values, strict=True):
        groups.setdefault(value, []).append(name)
    if len(groups) < 2:
        return None
    ordered = sorted(groups.items(), key=lambda group: len(group[1]))
    said = []
    for index, (value, members) in enumerate(ordered):
        if len(members) > _LISTED:
            last = index == len(ordered) - 1
            more = f"the other {len(members)}" if last else f"{len(members)} nodes"
            said.append(f"{value} on {more}")
        else:
            said.append(f"{value} on {', '.join(members)}")
    return "; ".join(said)
