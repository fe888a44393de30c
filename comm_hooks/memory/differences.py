"""Differences: send the difference of a vector from an estimate that all receivers share."""

from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from comm_hooks.memory.base import Memory
from comm_hooks.memory.error_feedback import ErrorFeedback
from comm_hooks.memory.rows import Rows, replace_


class Differences(Memory):
    """Keeps an estimate of every parameter's vector, shared with the receivers, and sends changes.

    EF21 (Richtarik, Sokolov & Fatkhullin, NeurIPS 2021); the Markov compression of CD-Adam (Wang,
    Lin & Chen, AISTATS 2022).  Per round and parameter, with vector g, estimate h (zero at first),
    compressor C and decompressor D:

    1. d = g - h;
    2. send c = D(C(d));
    3. h = h + c, unless some rank's vector was not finite: then h stays.

    A round returns the mean of the *changes* c: the receiver adds them up, as
    :class:`~comm_hooks.optim.EF21` and :class:`~comm_hooks.optim.CDAdam` do.  As the estimates
    approach the gradients, the changes and with them the compression error vanish.

    Memory: 4 bytes per compressed parameter and rank, and 4 more while a round is under way.
    Not supported: loss scales other than 1 (the estimates are in the gradients' units, and the
    optimizers above unscale first); compressors that are not contractive; hooks, because the
    optimizer would take the changes for gradients.

    Example::

        >>> Differences()
        Differences()
    """

    sends_changes = True
    source_collective = "all_gather"
    # A smaller estimate leaves a larger residual.
    _owed = -1.0

    def __init__(self) -> None:
        super().__init__()
        self._sending: WeakKeyDictionary[Rows, Tensor] = WeakKeyDictionary()

    def __repr__(self) -> str:
        return "Differences()"

    def fresh(self) -> "Differences":
        return Differences()

    def for_server(self) -> ErrorFeedback:
        # The owner of a shard sends a mean of changes: error feedback keeps its residual.
        return _EagerFeedback()

    def active(self, norms: Tensor) -> Tensor:
        # A gradient that has become zero is a change that receivers must get.
        return torch.ones_like(norms, dtype=torch.bool)

    def compensate(self, rows: Rows, active: Tensor, scale: float) -> None:
        rows.matrix.addcmul_(self._kept.matrix(rows), active.to(rows.matrix.dtype), value=-1)
        self._sending[rows] = rows.matrix.clone()

    def retain(self, rows: Rows, accept: Tensor, scale: float, key: int) -> None:
        estimates = self._kept.matrix(rows)
        sent = self._sending.pop(rows).sub_(rows.matrix)
        replace_(estimates, sent.add_(estimates), accept)


class _EagerFeedback(ErrorFeedback):
    """Error feedback that sends residuals even in a round with a vector of zeros."""

    def active(self, norms: Tensor) -> Tensor:
        return torch.ones_like(norms, dtype=torch.bool)
