"""One rank of the MPI tests: ``mpiexec -n 3 python -m mpi4py mpi_rank.py WHAT FOLDER``."""

import sys
from pathlib import Path
from typing import Any

import torch

from comm_hooks import ConfigMismatchError, Exchange, Identity, TopK
from comm_hooks.collectives import MPITransport
from tests.collectives.test_torch_distributed import requests
from tests.collectives.training import all_loops, in_flight


def replies() -> dict[str, Any]:
    from mpi4py import MPI

    transport = MPITransport()
    own = requests(transport.rank, transport.world_size)
    blocking = [transport.perform(request) for request in own]
    own = requests(transport.rank, transport.world_size)
    futures = [transport.start(request) for request in own]  # all in flight at once
    # The ranks but the first, in reverse order.
    world = MPI.COMM_WORLD
    sub = world.Split(int(world.rank > 0), -world.rank)
    reversed_ = MPITransport(sub)
    payload = torch.tensor([float(world.rank)])
    Exchange(TopK(), transport=reversed_).average_({"w": payload})
    return {
        "blocking": blocking,
        "started": [future.wait() for future in futures],
        "subgroup": (reversed_.rank, reversed_.world_size, float(payload)),
        "loops": all_loops(transport),
        "in_flight": in_flight(transport),
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


def train_privately(ledger: str) -> None:
    from torch import nn
    from torch.utils.data import DataLoader, TensorDataset

    from comm_hooks.optim.private import DPSGD, PrivacyEngine

    transport = MPITransport()
    torch.manual_seed(0)
    model = nn.Linear(4, 2)
    engine = PrivacyEngine(ledger=ledger)
    _, optimizer, loader = engine.make_private(
        module=model,
        optimizer=DPSGD(model.named_parameters(), lr=0.1),
        data_loader=DataLoader(TensorDataset(torch.randn(20, 4))),
        loss_function=lambda model, batch: model(batch[0]).square().mean(1),
        noise_multiplier=1.0,
        max_grad_norm=1.0,
        sample_rate=0.5,
        expected_batch_size=20,
        exchange=Exchange(Identity(), transport=transport),
    )
    for batch in loader:
        optimizer.backward(batch)
        optimizer.step()
    print(f"rank {transport.rank}: {engine.get_epsilon(delta=1e-3):.3f}", flush=True)


if __name__ == "__main__":
    torch.set_num_threads(1)
    own = (sys.argv[2],) if sys.argv[1] == "train_privately" else ()
    result = globals()[sys.argv[1]](*own)
    if result is not None:
        from mpi4py import MPI

        torch.save(result, Path(sys.argv[2]) / f"{MPI.COMM_WORLD.rank}.pt")
