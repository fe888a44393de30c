"""Differences: send only how far the vector has moved from what the others believe it to be."""

from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from comm_hooks.memory.base import Memory
from comm_hooks.memory.error_feedback import ErrorFeedback
from comm_hooks.memory.named_rows import replace_
from comm_hooks.memory.rows import Rows


class Differences(Memory):
    """Keeps an estimate of every parameter's vector, shared with the receivers, and sends changes.

    EF21 (Richtarik, Sokolov & Fatkhullin, NeurIPS 2021); the Markov compression of CD-Adam (Wang,
    Lin & Chen, AISTATS 2022).  Per round and parameter, h starting at zero:

    1. d = g - h;
    2. send c = D(C(d));
    3. h = h + c, unless some rank's vector was not finite: then h stays.

    What a round returns is the mean of the *changes* c: the receiver adds them up, as
    :class:`~comm_hooks.optim.EF21` and :class:`~comm_hooks.optim.CDAdam` do.  As the estimates
    approach the gradients, the changes and with them the compression error vanish.

    Memory: 4 bytes per compressed parameter and rank, and 4 more while a round is under way.
    Not supported: loss scales other than 1 (the estimates are in the gradients' units, and the
    optimizers above unscale first); compressors that are not contractive; hooks, whose optimizer
    would take the changes for gradients.

    Example::

        >>> Differences()
        Differences()
    """

    sends_changes = True
    # The less the receivers believe, the more they still have to receive.
    _owed = -1.0

    def __init__(self) -> None:
        super().__init__()
        self._sending: WeakKeyDictionary[Rows, Tensor] = WeakKeyDictionary()

    def __repr__(self) -> str:
        return "Differences()"

    def fresh(self) -> "Differences":
        return Differences()

    def for_server(self) -> ErrorFeedback:
        # The server's changes are to the sum of the changes it was sent: what it left out of the
        # latter is the difference between the two, which error feedback keeps.
        return _EagerFeedback()

    def active(self, norms: Tensor) -> Tensor:
        # That a gradient has become zero is a change which the receivers must hear of.
        return torch.ones_like(norms, dtype=torch.bool)

    def compensate(self, rows: Rows, active: Tensor, scale: float) -> None:
        rows.matrix.addcmul_(self._kept.matrix(rows), active.to(rows.matrix.dtype), value=-1)
        self._sending[rows] = rows.matrix.clone()

    def retain(self, rows: Rows, accept: Tensor, scale: float, key: int) -> None:
        estimates = self._kept.matrix(rows)
        sent = self._sending.pop(rows).sub_(rows.matrix)
        replace_(estimates, sent.add_(estimates), accept)


class _EagerFeedback(ErrorFeedback):
    """What the server has not passed on yet, which it also sends when no new changes come in."""

    def active(self, norms: Tensor) -> Tensor:
        return torch.ones_like(norms, dtype=torch.bool)
