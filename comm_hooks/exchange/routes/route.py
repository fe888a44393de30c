"""The interface of all routes, and their shared parts."""

from abc import ABC, abstractmethod
from collections.abc import Sequence

import torch

from comm_hooks.collectives.base import Transport
from comm_hooks.collectives.requests import Round
from comm_hooks.compressors.base import Compressor
from comm_hooks.exchange.layout import Workspace
from comm_hooks.exchange.message import RoundContext
from comm_hooks.exchange.payload import PayloadFormat


class Route(ABC):
    """A sequence of collectives that averages the vectors of one bucket."""

    @property
    @abstractmethod
    def traffic(self) -> int:
        """The number of bytes that each rank sends in a round; it receives as many."""

    @property
    def traffic_between_nodes(self) -> int:
        """The part of :attr:`traffic` that leaves the node; 0 in routes without nodes."""
        return 0

    @abstractmethod
    def reduce(self, context: RoundContext) -> Round[None]:
        """Return a round that averages the workspace over ranks; NaN if any is not finite."""


def format_of(
    vectors: Workspace,
    compressors: Sequence[Compressor],
    transport: Transport,
    *,
    summed: bool = False,
) -> PayloadFormat:
    """Return the payload format of vectors, with one compressor for each of their parts."""
    shapes = [part.matrix.shape for part in vectors.parts()]
    parts = [(c, *shape) for c, shape in zip(compressors, shapes, strict=True)]
    return PayloadFormat(parts, transport.ranks, transport.rank, summed=summed)


def fill_nan_(vector: torch.Tensor, health: torch.Tensor) -> None:
    """Fill ``vector`` with NaN if ``health`` is NaN, without waiting for an accelerator."""
    if health.device.type != "cpu" or not torch.isfinite(health):
        vector.add_(health)
