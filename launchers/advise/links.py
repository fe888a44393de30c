"""The links between ranks and inside nodes, each direction by itself, as ranks use them."""

import socket
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass

import torch
import torch.distributed as dist

from comm_hooks.collectives import TorchDistributed
from comm_hooks.collectives.requests import AllGatherObject
from comm_hooks.launchers.advise.cost_model import Link, Network
from comm_hooks.launchers.clock import synchronize
from comm_hooks.launchers.links import (
    answer,
    make_rounds,
    measure_bandwidth,
    measure_delay,
    nodes_of,
)
from comm_hooks.launchers.place import find_place


@dataclass(frozen=True)
class Measured:
    """One direction between two ranks."""

    source: int
    target: int
    inside: bool
    link: Link


def edges_of(nodes: Sequence[Sequence[int]]) -> list[list[tuple[int, int, bool]]]:
    """Return which pairs are measured, in turns of pairs that share no rank.

    The first ranks of neighbouring nodes, in a ring, then the first two ranks of every node.
    Each is (rank, rank, whether inside a node), and is measured in both directions.

    Example::

        >>> edges_of([[0, 1], [2, 3]])
        [[(0, 2, False)], [(0, 1, True), (2, 3, True)]]
    """
    rounds = make_rounds(len(nodes), all_pairs_up_to=3)
    between = [[(nodes[a][0], nodes[b][0], False) for a, b in pairs] for pairs in rounds]
    inside = [(node[0], node[1], True) for node in nodes if len(node) > 1]
    return [*between, *([inside] if inside else [])]


def measure_links(device: torch.device) -> tuple[list[Measured], list[list[int]]]:
    """Measure the links between and inside nodes; return them, and the ranks of each node.

    Collective: all ranks call it, and get the same.
    """
    transport = TorchDistributed()
    rank = transport.rank
    nodes = nodes_of(
        transport.perform(AllGatherObject(f"{socket.gethostname()} {find_place().node}"))
    )
    mine: list[Measured] = []
    for turn in edges_of(nodes):
        for one, other, inside in turn:
            for source, target in ((one, other), (other, one)):
                if rank == source:
                    channel = _Peer(target, device)
                    latency = measure_delay(channel).latency
                    bandwidth = measure_bandwidth(channel, latency, repeat=3)
                    mine.append(Measured(source, target, inside, Link(bandwidth, latency)))
                elif rank == target:
                    answer(_Peer(source, device))
        dist.barrier()
    everybody = transport.perform(AllGatherObject([asdict(measured) for measured in mine]))
    found = [
        Measured(**{**plain, "link": Link(**plain["link"])})
        for of_rank in everybody
        for plain in of_rank
    ]
    return found, nodes


class _Peer:
    """A channel to another rank of the process group."""

    def __init__(self, peer: int, device: torch.device) -> None:
        self._peer, self._device = peer, device

    def send(self, count: int) -> None:
        self._send(torch.zeros(count, dtype=torch.uint8, device=self._device))

    def receive(self, count: int) -> None:
        self._receive(torch.empty(count, dtype=torch.uint8, device=self._device))

    def tell(self, number: float) -> None:
        self._send(torch.tensor([number], dtype=torch.float64, device=self._device))

    def hear(self) -> float:
        number = torch.zeros(1, dtype=torch.float64, device=self._device)
        self._receive(number)
        return float(number)

    def _send(self, tensor: torch.Tensor) -> None:
        dist.send(tensor, dst=self._peer)
        synchronize(self._device)

    def _receive(self, tensor: torch.Tensor) -> None:
        dist.recv(tensor, src=self._peer)
        synchronize(self._device)


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
