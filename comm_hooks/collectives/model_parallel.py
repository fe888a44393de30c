"""Ranks that train with this one and exchange nothing with it: they hold other parts of a model."""

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
    """Return what each rank has found, the same on all of them.

    All must call it: those of the transport, and those that hold other parts.

    Args:
        transport: between the ranks that exchange.
        model_parallel_groups: groups across them, one for each way in which the model is divided.
        finding: of this rank, as plain values.
    """
    found: list[Any] = transport.perform(AllGatherObject(finding))
    for group in model_parallel_groups:
        of_ranks = TorchDistributed(group).perform(AllGatherObject(found))
        found = [each for of_rank in of_ranks for each in of_rank]
    return found


def found_by_all(model_parallel_groups: Iterable[Transport], finding: torch.Tensor) -> torch.Tensor:
    """Return whether all ranks that hold other parts have found what this one has.

    Args:
        model_parallel_groups: between them, one for each way in which the model is divided.
        finding: a boolean, ().
    """
    missing = (~finding).float().view(1)
    for transport in model_parallel_groups:
        missing = transport.perform(AllReduce(missing))
    return missing.squeeze() == 0
