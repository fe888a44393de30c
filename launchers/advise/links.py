"""Bandwidth and latency of the links between ranks, each direction by itself."""

import socket
import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass

import torch
import torch.distributed as dist

from comm_hooks.collectives import TorchDistributed
from comm_hooks.collectives.requests import AllGatherObject
from comm_hooks.launchers.advise.cost_model import Link, Network
from comm_hooks.launchers.place import Place

_PINGS = 30
_FIRST_BYTES = 1 << 16
_MOST_BYTES = 1 << 28
_ENOUGH_SECONDS = 0.4
"""A transfer that takes this long is past TCP's slow start on links down to a few Mbit."""


@dataclass(frozen=True)
class Measured:
    """One direction between two ranks."""

    source: int
    target: int
    inside: bool
    link: Link


def nodes_of(labels: Sequence[str]) -> list[list[int]]:
    """Return the ranks of each node, given what each rank calls its node.

    Example::

        >>> nodes_of(["a", "a", "b", "b"])
        [[0, 1], [2, 3]]
    """
    nodes: dict[str, list[int]] = {}
    for rank, label in enumerate(labels):
        nodes.setdefault(label, []).append(rank)
    return list(nodes.values())


def edges_of(nodes: Sequence[Sequence[int]]) -> list[list[tuple[int, int, bool]]]:
    """Return which pairs are measured, in turns of pairs that share no rank.

    The first ranks of neighbouring nodes, in a ring, then the first two ranks of every node.
    Each is (rank, rank, whether inside a node), and is measured in both directions.

    Example::

        >>> edges_of([[0, 1], [2, 3]])
        [[(0, 2, False)], [(0, 1, True), (2, 3, True)]]
    """
    first = [node[0] for node in nodes]
    count = len(first)
    ring = [(first[i], first[(i + 1) % count], False) for i in range(count if count > 2 else 0)]
    if count == 2:
        ring = [(first[0], first[1], False)]
    # Every other edge of a ring; of an odd one, the last edge by itself.
    last = ring[-1:] if count > 2 and count % 2 else []
    paired = ring[: len(ring) - len(last)]
    inside = [(node[0], node[1], True) for node in nodes if len(node) > 1]
    return [turn for turn in (paired[::2], paired[1::2], last, inside) if turn]


def measure_links(place: Place, device: torch.device) -> tuple[list[Measured], list[list[int]]]:
    """Measure the links between and inside nodes; return them, and the ranks of each node.

    Latency is half the median time of a tiny message there and back; bandwidth that of transfers
    of 0.4 s or 256 MiB.  Other traffic on a link is part of what is measured.  Collective: all
    ranks call it, and get the same.
    """
    transport = TorchDistributed()
    labels = transport.perform(AllGatherObject(f"{socket.gethostname()} {place.node}"))
    nodes = nodes_of(labels)
    mine: list[Measured] = []
    for turn in edges_of(nodes):
        for one, other, inside in turn:
            if place.rank in (one, other):
                peer = other if place.rank == one else one
                mine += _measure_pair(place.rank, peer, inside, device)
        dist.barrier()
    everybody = transport.perform(AllGatherObject([asdict(measured) for measured in mine]))
    found = [
        Measured(**{**plain, "link": Link(**plain["link"])})
        for of_rank in everybody
        for plain in of_rank
    ]
    return found, nodes


def _measure_pair(rank: int, peer: int, inside: bool, device: torch.device) -> list[Measured]:
    """Measure both directions with a peer that does the same; return the one from here."""
    pings = []
    tiny = torch.zeros(1, dtype=torch.uint8, device=device)
    for _ in range(_PINGS):
        started = time.perf_counter()
        for sender in sorted((rank, peer)):
            _pass(tiny, rank, sender, peer)
        pings.append(time.perf_counter() - started)
    latency = statistics.median(pings) / 2
    found = []
    for sender in sorted((rank, peer)):
        bandwidth = _bandwidth(rank, sender, peer, device, latency)
        if sender == rank:
            found.append(Measured(rank, peer, inside, Link(bandwidth, latency)))
    return found


def _bandwidth(rank: int, sender: int, peer: int, device: torch.device, latency: float) -> float:
    """Return the bytes per second from ``sender``, with transfers that grow until one is long.

    The median of three of that size: one alone may fall into a moment when a machine is busy.
    """
    count = _FIRST_BYTES
    while True:
        seconds = _transfer(count, rank, sender, peer, device, latency)
        if seconds >= _ENOUGH_SECONDS or count >= _MOST_BYTES:
            again = [_transfer(count, rank, sender, peer, device, latency) for _ in range(2)]
            return count / statistics.median([seconds, *again])
        count = min(_MOST_BYTES, 2 * count if seconds > _ENOUGH_SECONDS / 8 else 8 * count)


def _transfer(
    count: int, rank: int, sender: int, peer: int, device: torch.device, latency: float
) -> float:
    """Return the seconds in which ``count`` bytes arrive; the same on both ranks."""
    tiny = torch.zeros(1, dtype=torch.uint8, device=device)
    data = torch.zeros(count, dtype=torch.uint8, device=device)
    started = time.perf_counter()
    _pass(data, rank, sender, peer)
    _pass(tiny, rank, peer if sender == rank else rank, peer)  # it has arrived
    seconds = max(1e-9, time.perf_counter() - started - 2 * latency)
    # Both must go on or stop, so the sender's clock decides.
    verdict = torch.tensor([seconds], dtype=torch.float64, device=device)
    _pass(verdict, rank, sender, peer)
    return float(verdict)


def _pass(tensor: torch.Tensor, rank: int, sender: int, peer: int) -> None:
    if rank == sender:
        dist.send(tensor, dst=peer)
    else:
        dist.recv(tensor, src=peer)
    if tensor.device.type == "cuda":
        torch.cuda.synchronize(tensor.device)


def network_of(
    measured: Sequence[Measured], nodes: Sequence[Sequence[int]], backend: str
) -> Network:
    """Return the network as the slowest of its links make it."""
    slowest: Mapping[bool, Link | None] = {
        inside: _slowest([m.link for m in measured if m.inside == inside])
        for inside in (False, True)
    }
    between = slowest[False] or slowest[True]
    assert between, "of two ranks or more some link was measured"
    ranks = sum(map(len, nodes))
    return Network(ranks, between, max(map(len, nodes)), slowest[True], backend)


def _slowest(links: Sequence[Link]) -> Link | None:
    if not links:
        return None
    return Link(min(link.bandwidth for link in links), max(link.latency for link in links))
