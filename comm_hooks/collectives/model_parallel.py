"""Collectives with model-parallel ranks, which hold other parts of the model."""

from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist

from comm_hooks.collectives.base import Transport
from comm_hooks.collectives.requests import AllGatherObject, AllReduce
from comm_hooks.collectives.torch_distributed import TorchDistributed


def gather_from_all(
    transport: Transport, model_parallel_groups: Iterable[dist.ProcessGroup], finding: Any
) -> list[Any]:
    """Return the findings of all ranks, in the same order on all of them.

    Collective over the ranks of the transport and the model-parallel ranks.

    Args:
        transport: between the ranks that exchange.
        model_parallel_groups: groups across them, one for each dimension of the model's division.
        finding: of this rank, as plain values.
    """
    found: list[Any] = transport.perform(AllGatherObject(finding))
    for group in model_parallel_groups:
        of_ranks = TorchDistributed(group).perform(AllGatherObject(found))
        found = [each for of_rank in of_ranks for each in of_rank]
    return found


def found_by_all(model_parallel_groups: Iterable[Transport], finding: torch.Tensor) -> torch.Tensor:
    """Return whether the finding is true on all model-parallel ranks.

    Args:
        model_parallel_groups: one transport for each dimension of the model's division.
        finding: a boolean, ().
    """
    missing = (~finding).float().view(1)
    for transport in model_parallel_groups:
        missing = transport.perform(AllReduce(missing))
    return missing.squeeze() == 0
