"""The process group of the ranks that a launcher started, and measurements of their links."""

import datetime
import functools
import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from comm_hooks.launchers.advise.cost_model import Link, Network
from comm_hooks.launchers.advise.step import synchronize
from comm_hooks.launchers.environment import LauncherEnvironment, detect_environment
from comm_hooks.launchers.links import (
    answer,
    make_rounds,
    measure_bandwidth,
    measure_delay,
    nodes_of,
)
from comm_hooks.launchers.network import (
    DEFAULT_PORT,
    Endpoint,
    loopback_interface,
    wait_for_port,
)

T = TypeVar("T")


@contextmanager
def joined(process: LauncherEnvironment, backend: str, timeout: float) -> Iterator[None]:
    """Initialize the process group of all ranks, and destroy it at the end of the context.

    Raises:
        ValueError: if the other ranks cannot be reached within ``timeout`` seconds, or the
            environment has no address of rank 0.
    """
    address = os.environ.get("MASTER_ADDR", "")
    if not address and process.local_size == process.world_size:
        address = "127.0.0.1"
    if not address:
        raise ValueError(
            "the launcher does not say where rank 0 is: set MASTER_ADDR to its address "
            "(and MASTER_PORT, unless it is 29500) on all ranks"
        )
    port = os.environ.get("MASTER_PORT", str(DEFAULT_PORT))
    os.environ.update(MASTER_ADDR=address, MASTER_PORT=port)
    if address in ("127.0.0.1", "localhost", "::1") and (interface := loopback_interface()):
        os.environ.setdefault("GLOO_SOCKET_IFNAME", interface)
    try:
        # c10d would fill the screen while it waits in vain.
        if process.rank > 0 and (reason := wait_for_port(Endpoint(address, int(port)), timeout)):
            raise ConnectionError(reason)
        dist.init_process_group(
            backend,
            rank=process.rank,
            world_size=process.world_size,
            timeout=datetime.timedelta(seconds=timeout),
        )
        device = "cuda" if backend == "nccl" else "cpu"
        dist.all_reduce(torch.zeros(1, device=device))  # opens the connections
    except (RuntimeError, ValueError, OSError) as error:
        reason = str(error).strip().splitlines()[0].rstrip(".")
        raise ValueError(
            f"rank {process.rank} of {process.world_size} did not reach the others through "
            f"{address}:{port} within {timeout:g} s ({reason}): start the command on every node, "
            "open that port, or name the interface in GLOO_SOCKET_IFNAME or NCCL_SOCKET_IFNAME"
        ) from None
    try:
        yield
    finally:
        dist.destroy_process_group()


@dataclass(frozen=True)
class Measured:
    """The measured link from rank ``source`` to rank ``target``."""

    source: int
    target: int
    link: Link


def measure_links(device: torch.device, backend: str) -> tuple[Network, list[Measured]]:
    """Measure the links between nodes, or on a single node the link between its first two ranks.

    The first ranks of neighbouring nodes take part, in turns of pairs that have no rank in common.
    All ranks must call it, and get the same result.
    """
    rank = dist.get_rank()
    nodes = nodes_of(gather(f"{socket.gethostname()} {detect_environment().node}"))
    ends = [node[0] for node in nodes] if len(nodes) > 1 else nodes[0][:2]
    own: list[Measured] = []
    for turn in make_rounds(len(ends), all_pairs_up_to=3):
        for one, other in ((ends[a], ends[b]) for a, b in turn):
            for source, target in ((one, other), (other, one)):
                if rank == source:
                    channel = _Peer(target, device)
                    latency = measure_delay(channel).latency
                    bandwidth = measure_bandwidth(channel, latency, repeat=3)
                    own.append(Measured(source, target, Link(bandwidth, latency)))
                elif rank == target:
                    answer(_Peer(source, device))
        dist.barrier()
    found = [measured for of_rank in gather(own) for measured in of_rank]
    slowest = functools.reduce(Link.slowest, (measured.link for measured in found))
    ranks_per_node = max(map(len, nodes))
    return Network(dist.get_world_size(), slowest, ranks_per_node, backend), found


def gather(value: T) -> list[T]:
    """Return the values of all ranks, in the order of ranks; all ranks must call it."""
    values: list[Any] = [value]
    if dist.is_initialized():
        values = [None] * dist.get_world_size()
        dist.all_gather_object(values, value)
    return values


class _Peer:
    """A :class:`~comm_hooks.launchers.links.Channel` to another rank of the process group."""

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
