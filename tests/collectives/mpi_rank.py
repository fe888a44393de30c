"""One rank of the MPI tests: ``mpiexec -n 3 python -m mpi4py mpi_rank.py WHAT FOLDER``."""

import sys
from pathlib import Path
from typing import Any

import torch

from comm_hooks import ConfigMismatchError, Exchange, TopK
from comm_hooks.collectives import MPITransport
from tests.collectives.test_torch_distributed import requests
from tests.collectives.training import all_loops


def replies() -> dict[str, Any]:
    from mpi4py import MPI

    transport = MPITransport()
    own = requests(transport.rank, transport.world_size)
    replies = [transport.perform(request) for request in own]
    # The ranks but the first, in reverse order.
    world = MPI.COMM_WORLD
    sub = world.Split(int(world.rank > 0), -world.rank)
    reversed_ = MPITransport(sub)
    payload = torch.tensor([float(world.rank)])
    Exchange(TopK(), transport=reversed_).average_({"w": payload})
    return {
        "replies": replies,
        "subgroup": (reversed_.rank, reversed_.world_size, float(payload)),
        "loops": all_loops(transport),
    }


def raise_on_one_rank() -> None:
    transport = MPITransport()
    exchange = Exchange(TopK(), transport=transport)
    for step in range(3):
        if step == 1 and transport.rank == 1:
            raise ValueError("the data of rank 1 are broken")
        exchange.average_({"w": torch.ones(64, 64)})


def configure_one_rank_otherwise() -> None:
    transport = MPITransport()
    exchange = Exchange(TopK(), seed=transport.rank, transport=transport)
    try:
        exchange.average_({"w": torch.ones(64, 64)})
    except ConfigMismatchError as error:
        print(f"rank {transport.rank}: {error}", flush=True)


if __name__ == "__main__":
    torch.set_num_threads(1)
    result = globals()[sys.argv[1]]()
    if result is not None:
        from mpi4py import MPI

        torch.save(result, Path(sys.argv[2]) / f"{MPI.COMM_WORLD.rank}.pt")
