"""Measure the network between the ranks of a testbed, for predictions."""

import socket

import torch.distributed as dist

from comm_hooks.launchers.advise.cost_model import Link, Network
from comm_hooks.launchers.preflight import links


def measure_network() -> Network:
    """Return the network by its link from rank 0 to rank 1: all links are the same. Collective."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    listener = links.Listener(socket.gethostbyname(f"rank{rank}"))
    ports: list[int] = [0] * ranks
    dist.all_gather_object(ports, listener.port)
    measured = links.Link(0, 1)
    if rank == 0:
        links.send(measured, "rank1", ports[1])
    elif rank == 1:
        listener.receive(measured)
    listener.close()
    found = [measured]
    dist.broadcast_object_list(found)
    (link,) = found
    if not link.bits_per_second or not link.round_trip:
        raise RuntimeError(f"the link between the first ranks cannot be measured: {link.error}")
    return Network(ranks, Link(link.bits_per_second / 8, link.round_trip / 2))
