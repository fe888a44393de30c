"""Inner optimizers that have more averaged at the end of a round than the parameters."""

from collections.abc import Mapping
from typing import Protocol, runtime_checkable

import torch


@runtime_checkable
class SharesStatistics(Protocol):
    """An inner optimizer that wants more averaged at the end of a round than the parameters."""

    def statistics(self) -> dict[str, torch.Tensor]:
        """Return this client's tensors; the same names and shapes on all clients."""

    def set_statistics(self, mean: Mapping[str, torch.Tensor]) -> None:
        """Take the mean over the round's clients."""
