"""Collectives that include the model-parallel ranks, which hold other parts of the same model."""

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
    """Gather plain values from all ranks, model-parallel ranks included, in one order for all.

    Collective over the ranks of the transport and the model-parallel ranks.

    Args:
        transport: connects the ranks that average gradients.
        model_parallel_groups: the groups of this rank over which the model is divided, one for each
            dimension of the division.
        finding: the plain values of this rank, which can be sent as JSON.
    """
    found: list[Any] = transport.perform(AllGatherObject(finding))
    for group in model_parallel_groups:
        of_ranks = TorchDistributed(group).perform(AllGatherObject(found))
        found = [each for of_rank in of_ranks for each in of_rank]
    return found


def found_by_all(model_parallel_groups: Iterable[Transport], finding: torch.Tensor) -> torch.Tensor:
    """Return whether a condition holds on all model-parallel ranks: a boolean tensor, ().

    Args:
        model_parallel_groups: one transport for each dimension of the model's division.
        finding: whether it holds on this rank: a boolean tensor, ().
    """
    missing = (~finding).float().view(1)
    for transport in model_parallel_groups:
        missing = transport.perform(AllReduce(missing))
    return missing.squeeze() == 0
