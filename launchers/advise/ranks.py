"""The process group of ranks that torchrun, mpirun or srun started."""

import datetime
import os
from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist

from comm_hooks.launchers.endpoint import (
    DEFAULT_PORT,
    Endpoint,
    loopback_interface,
    wait_for_port,
)
from comm_hooks.launchers.place import Place


@contextmanager
def joined(place: Place, backend: str, timeout: float) -> Iterator[None]:
    """Join the process group of all ranks for a while.

    Raises:
        ValueError: if the other ranks cannot be reached within ``timeout`` seconds, or nothing
            says where rank 0 is.
    """
    address = os.environ.get("MASTER_ADDR", "")
    if not address and place.local_size == place.world_size:
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
        if place.rank > 0 and (reason := wait_for_port(Endpoint(address, int(port)), timeout)):
            raise ConnectionError(reason)
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
