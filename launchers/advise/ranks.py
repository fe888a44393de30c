"""Who the ranks are, under torchrun, mpirun, srun or none, and how they meet."""

import datetime
import os
import socket
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass

import torch
import torch.distributed as dist

_PORT = "29500"
_RETRY_SECONDS = 0.2

# Rank, number of ranks, rank within the node, and ranks of the node, as launchers tell them.
_LAUNCHERS: Mapping[str, tuple[str, str, str, str]] = {
    "torch.distributed": ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"),
    "Open MPI": (
        "OMPI_COMM_WORLD_RANK",
        "OMPI_COMM_WORLD_SIZE",
        "OMPI_COMM_WORLD_LOCAL_RANK",
        "OMPI_COMM_WORLD_LOCAL_SIZE",
    ),
    "MPICH": ("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS"),
    "Slurm": ("SLURM_PROCID", "SLURM_NTASKS", "SLURM_LOCALID", "SLURM_NTASKS_PER_NODE"),
}
# Tells apart nodes of one host name, such as containers.
_NODE = ("GROUP_RANK", "SLURM_NODEID")


@dataclass(frozen=True)
class Place:
    """Where this process stands among the ranks."""

    rank: int = 0
    world_size: int = 1
    local_rank: int = 0
    local_world_size: int = 1
    node: str = ""


def find_place(environment: Mapping[str, str] | None = None) -> Place:
    """Return this process's place by what its launcher tells; without a launcher it is alone.

    Raises:
        ValueError: if a launcher's variables contradict each other.

    Example::

        >>> find_place({"PMI_RANK": "1", "PMI_SIZE": "2", "MPI_LOCALRANKID": "1"})
        Place(rank=1, world_size=2, local_rank=1, local_world_size=1, node='')
    """
    environment = os.environ if environment is None else environment
    for launcher, (rank, size, local_rank, local_size) in _LAUNCHERS.items():
        if rank in environment and size in environment:
            place = Place(
                _read(environment, rank, 0),
                _read(environment, size, 1),
                _read(environment, local_rank, 0),
                _read(environment, local_size, 1),
                next((environment[name] for name in _NODE if name in environment), ""),
            )
            if not 0 <= place.rank < place.world_size:
                raise ValueError(
                    f"{launcher} set {rank}={place.rank} and {size}={place.world_size}: a rank "
                    "lies between 0 and the number of ranks less 1"
                )
            return place
    return Place()


def _read(environment: Mapping[str, str], name: str, default: int) -> int:
    value = environment.get(name, str(default))
    try:
        return int(value)
    except ValueError:
        raise ValueError(f"{name}={value!r} in the environment is not a number") from None


@contextmanager
def joined(place: Place, backend: str, timeout: float) -> Iterator[None]:
    """Join the process group of all ranks for a while.

    Raises:
        ValueError: if the other ranks cannot be reached within ``timeout`` seconds, or nothing
            says where rank 0 is.
    """
    address = os.environ.get("MASTER_ADDR", "")
    if not address and place.local_world_size == place.world_size:
        address = "127.0.0.1"
    if not address:
        raise ValueError(
            "the launcher does not say where rank 0 is: set MASTER_ADDR to its address "
            "(and MASTER_PORT, unless it is 29500) on all ranks"
        )
    port = os.environ.get("MASTER_PORT", _PORT)
    os.environ.update(MASTER_ADDR=address, MASTER_PORT=port)
    if address in ("127.0.0.1", "localhost", "::1"):
        # Left alone, gloo looks up the host's own name, which need not resolve.
        loopback = [name for _, name in socket.if_nameindex() if name.startswith("lo")]
        for interface in loopback[:1]:
            os.environ.setdefault("GLOO_SOCKET_IFNAME", interface)
    try:
        if place.rank > 0:
            _await_rank_0(address, port, timeout)
        dist.init_process_group(
            backend,
            rank=place.rank,
            world_size=place.world_size,
            timeout=datetime.timedelta(seconds=timeout),
        )
        device = "cuda" if backend == "nccl" else "cpu"
        dist.all_reduce(torch.zeros(1, device=device))  # opens the connections
    except (RuntimeError, ValueError, OSError) as error:
        reason = str(error).strip().splitlines()[0].rstrip(".")
        raise ValueError(
            f"rank {place.rank} of {place.world_size} did not reach the others through "
            f"{address}:{port} within {timeout:g} s ({reason}): start the command on every node, "
            "open that port, or name the interface in GLOO_SOCKET_IFNAME or NCCL_SOCKET_IFNAME"
        ) from None
    try:
        yield
    finally:
        dist.destroy_process_group()


def _await_rank_0(address: str, port: str, timeout: float) -> None:
    """Return once somebody listens there; c10d would fill the screen while it waits in vain.

    Raises:
        OSError: if nobody does within ``timeout`` seconds.
    """
    deadline = time.monotonic() + timeout
    while True:
        left = deadline - time.monotonic()
        try:
            socket.create_connection((address, int(port)), timeout=max(0.1, left)).close()
            return
        except OSError:
            if left <= _RETRY_SECONDS:
                raise
            time.sleep(_RETRY_SECONDS)
