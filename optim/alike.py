"""Settings that ranks must have in common which exchange nothing: holders of parts of a model."""

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import torch.distributed as dist

from comm_hooks.collectives.model_parallel import gather_from_all
from comm_hooks.exchange import Exchange
from comm_hooks.exchange.agreement import check_agreement


class Divided(Protocol):
    """An optimizer that exchanges, perhaps parts of a sharded model."""

    @property
    def exchange(self) -> Exchange:
        """Between the ranks that hold the same parts."""

    @property
    def model_parallel_groups(self) -> Sequence[dist.ProcessGroup]:
        """Groups of ranks that hold other parts."""

    def hyperparameters(self) -> Mapping[str, Any]:
        """Return what the next step goes by."""


def require_alike(optimizer: Divided) -> None:
    """Raise ``ConfigMismatchError`` on all ranks if some of a sharded model go by other settings.

    Exchanges compare those of the ranks that exchange; this one is for all that share a model, and
    does nothing where it is not sharded.  All ranks must call it.
    """
    model_parallel_groups = optimizer.model_parallel_groups
    if model_parallel_groups:
        exchange = optimizer.exchange
        own = {**exchange.config(), **optimizer.hyperparameters()}
        found = gather_from_all(exchange.transport, model_parallel_groups, [dist.get_rank(), own])
        found.sort(key=lambda entry: entry[0])
        check_agreement([config for _, config in found], [rank for rank, _ in found])
