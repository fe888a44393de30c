"""Momentum correction: what waits to be sent gathers momentum meanwhile."""

import math
from collections.abc import Mapping, Sequence
from weakref import WeakKeyDictionary

import torch

from comm_hooks.memory.base import Memory, add_rows, mean_rows
from comm_hooks.memory.error_feedback import ErrorFeedback
from comm_hooks.memory.named_rows import NamedRows, check_rows, replace_
from comm_hooks.memory.rows import Rows
from comm_hooks.requirements import require_within

_VELOCITY, _RESIDUAL = "velocity.", "residual."


class MomentumCorrection(Memory):
    """Error feedback of the velocity, for sparse compressors: Deep Gradient Compression.

    Lin, Han, Mao, Wang & Dally, ICLR 2018, sections 3.1 and 3.2 (momentum correction and momentum
    factor masking).  Per round and parameter:

    1. u = momentum u + g;
    2. a = e + u;
    3. send c = D(C(a));
    4. e = a - c, and u = 0 where c is not 0, unless some rank's vector was not finite, or g is all
       zero: then both stay.

    The momentum is applied before sending, by each rank: the optimizer behind it is plain SGD.
    Clearing u where something was sent keeps momenta that are out of date from pushing on.

    Args:
        momentum: in [0, 1).

    Memory: 8 bytes per compressed parameter and rank, and 4 more while a round is under way.
    Not supported: dense compressors (step 4 would clear all of u).

    Example::

        >>> MomentumCorrection(momentum=0.9)
        MomentumCorrection(momentum=0.9)
    """

    def __init__(self, momentum: float = 0.9) -> None:
        require_within(self, "momentum", momentum, "[0, 1)")
        self.momentum = momentum
        self._velocities = NamedRows(torch.zeros_like)
        self._residuals = NamedRows(torch.zeros_like)
        self._sending: WeakKeyDictionary[Rows, torch.Tensor] = WeakKeyDictionary()

    def __repr__(self) -> str:
        return f"MomentumCorrection(momentum={self.momentum!r})"

    def fresh(self) -> "MomentumCorrection":
        return MomentumCorrection(self.momentum)

    def for_server(self) -> ErrorFeedback:
        return ErrorFeedback()

    def compensate(self, rows: Rows, active: torch.Tensor, scale: float) -> None:
        is_active = active.to(rows.matrix.dtype)
        velocities = self._velocities.matrix(rows)
        rows.matrix.addcmul_(velocities, is_active, value=scale * self.momentum)
        rows.matrix.addcmul_(self._residuals.matrix(rows), is_active, value=scale)
        self._sending[rows] = rows.matrix.clone()

    def retain(self, rows: Rows, accept: torch.Tensor, scale: float, key: int) -> None:
        sending, left = self._sending.pop(rows), rows.matrix
        waits = sending == left
        if scale != 1:
            sending, left = sending / scale, left / scale
        residuals = self._residuals.matrix(rows)
        velocities = (sending - residuals).mul_(waits)
        replace_(self._velocities.matrix(rows), velocities, accept)
        replace_(residuals, left, accept)

    def give_back(self, rows: Rows, rest: torch.Tensor, scale: float) -> None:
        self._residuals.matrix(rows).add_(rest, alpha=1 / scale)

    def norm(self) -> float:
        return math.sqrt(sum(float(row.norm()) ** 2 for _, row, _ in self._residuals.items()))

    def state_dict(self) -> dict[str, torch.Tensor]:
        parts = {_VELOCITY: self._velocities, _RESIDUAL: self._residuals}
        return {
            prefix + name: row
            for prefix, part in parts.items()
            for name, row in part.state_dict().items()
        }

    def parameters_in(self, state: Mapping[str, torch.Tensor]) -> set[str]:
        return {name for prefix in (_VELOCITY, _RESIDUAL) for name in _strip(state, prefix)}

    def check(
        self, state: Mapping[str, torch.Tensor], numels: Mapping[str, int] | None = None
    ) -> None:
        widths = None
        if numels is not None:
            prefixes = (_VELOCITY, _RESIDUAL)
            widths = {prefix + n: numel for prefix in prefixes for n, numel in numels.items()}
        check_rows(state, torch.float32, self, widths)
        for name in state:
            if not name.startswith((_VELOCITY, _RESIDUAL)):
                raise ValueError(
                    f"the saved state of {self} must have velocities and residuals only, got "
                    f"{name!r}: load what state_dict() returned"
                )

    def load_state_dict(self, state: Mapping[str, torch.Tensor]) -> None:
        self.check(state)
        for prefix, part in {_VELOCITY: self._velocities, _RESIDUAL: self._residuals}.items():
            part.load_state_dict(_strip(state, prefix))

    def merge(
        self,
        states: Sequence[Mapping[str, torch.Tensor]],
        unsent: Mapping[str, torch.Tensor],
        numels: Mapping[str, int],
    ) -> dict[str, torch.Tensor]:
        for state in states:
            self.check(state, numels)
        return add_rows(mean_rows(states), {_RESIDUAL + n: row for n, row in unsent.items()})


def _strip(state: Mapping[str, torch.Tensor], prefix: str) -> dict[str, torch.Tensor]:
    """Return the rows under a prefix, by parameter name."""
    return {n.removeprefix(prefix): row for n, row in state.items() if n.startswith(prefix)}
