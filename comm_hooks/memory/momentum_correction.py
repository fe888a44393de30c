"""Momentum correction: residuals of the velocity instead of the gradient."""

from collections.abc import Mapping
from weakref import WeakKeyDictionary

from torch import Tensor

from comm_hooks.memory.base import Memory
from comm_hooks.memory.error_feedback import ErrorFeedback
from comm_hooks.memory.rows import Rows, replace_
from comm_hooks.requirements import require_within


class MomentumCorrection(Memory):
    """Error feedback of the velocity, for sparse compressors: Deep Gradient Compression.

    Lin, Han, Mao, Wang & Dally, ICLR 2018, sections 3.1 and 3.2 (momentum correction and momentum
    factor masking).  Per round and parameter, with gradient g, velocity u and residual e (zero at
    first), compressor C and decompressor D:

    1. u = momentum u + g;
    2. a = e + u;
    3. send c = D(C(a));
    4. e = a - c, and u = 0 where c is not 0, unless some rank's vector was not finite, or g is all
       zero: then both stay.

    Each rank applies the momentum before sending, so use plain SGD as the optimizer.
    Clearing u where an element was sent avoids stale momenta.

    Args:
        momentum: the momentum coefficient, in [0, 1).

    Memory: 8 bytes per compressed parameter and rank, and 4 more while a round is under way.
    Not supported: dense compressors (step 4 would clear all of u).

    Example::

        >>> MomentumCorrection(momentum=0.9)
        MomentumCorrection(momentum=0.9)
    """

    source_collective = "all_gather"

    def __init__(self, momentum: float = 0.9) -> None:
        require_within(self, "momentum", momentum, "[0, 1)")
        self.momentum = momentum
        super().__init__("velocity.", "residual.")
        self._sending: WeakKeyDictionary[Rows, Tensor] = WeakKeyDictionary()

    def __repr__(self) -> str:
        return f"MomentumCorrection(momentum={self.momentum!r})"

    def fresh(self) -> "MomentumCorrection":
        return MomentumCorrection(self.momentum)

    def for_server(self) -> ErrorFeedback:
        return ErrorFeedback()

    def compensate(self, rows: Rows, active: Tensor, scale: float) -> None:
        is_active = active.to(rows.matrix.dtype)
        velocities = self._stores["velocity."].matrix(rows)
        rows.matrix.addcmul_(velocities, is_active, value=scale * self.momentum)
        rows.matrix.addcmul_(self._kept.matrix(rows), is_active, value=scale)
        self._sending[rows] = rows.matrix.clone()

    def retain(self, rows: Rows, accept: Tensor, scale: float, key: int) -> None:
        sending, left = self._sending.pop(rows), rows.matrix
        waits = sending == left
        if scale != 1:
            sending, left = sending / scale, left / scale
        residuals = self._kept.matrix(rows)
        velocities = (sending - residuals).mul_(waits)
        replace_(self._stores["velocity."].matrix(rows), velocities, accept)
        replace_(residuals, left, accept)

    def check(self, state: Mapping[str, Tensor], numels: Mapping[str, int] | None = None) -> None:
        super().check(state, numels)
        for name in state:
            if not name.startswith((*self._stores,)):
                raise ValueError(
                    f"the saved state of {self} must have velocities and residuals only, got "
                    f"{name!r}: load what state_dict() returned"
                )
