"""The arithmetic of 1-bit Adam and LAMB: exact gradients, then momenta over a frozen variance."""

from typing import Any

import torch
from torch.optim.optimizer import ParamsT

from comm_hooks.exchange import Exchange
from comm_hooks.optim.base import Group, States, Tensors, block
from comm_hooks.optim.exchanging import ExchangingOptimizer
from comm_hooks.optim.moments import roots, values
from comm_hooks.requirements import require_positive

SIGNS = block(
    compressor="sign", block_size=None, scale="rms", memory="error_feedback", collective="sharded"
)
"""The settings of 1-bit Adam's exchange: signs and one scale per tensor, in both directions."""

# Far below the root of the smallest float32, so that it changes no denominator but zero.
TINY = 1e-30


class FreezingOptimizer(ExchangingOptimizer):
    """An optimizer that exchanges exact gradients for some steps, then compressed momenta.

    Args:
        params, exchange, defaults, settings: see :class:`ExchangingOptimizer`.
        freeze_step: the last step with exact gradients, at least 1.
        total_steps: the number of steps of the run, if known.

    Raises:
        ValueError: unless 1 <= ``freeze_step`` < ``total_steps``.
    """

    _grows = False

    def __init__(
        self,
        params: ParamsT,
        exchange: Exchange,
        defaults: Group,
        *,
        freeze_step: int,
        total_steps: int | None,
        **settings: Any,
    ) -> None:
        require_positive(self, "freeze_step", freeze_step)
        if total_steps is not None:
            require_positive(self, "total_steps", total_steps)
            if freeze_step >= total_steps:
                raise ValueError(
                    f"{type(self).__name__}: freeze_step {freeze_step} leaves none of total_steps "
                    f"{total_steps} to compress: take 20 %"
                )
        super().__init__(params, exchange, defaults, freeze_step=freeze_step, **settings)
        self.freeze_step = freeze_step

    def _is_exact(self, states: States) -> bool:
        return int(states[0]["step"]) < self.freeze_step

    def _set_momenta(self, gradients: Tensors, states: States) -> None:
        """Replace this rank's gradients, in the list, by its momenta; see :func:`momenta`."""
        for own, group in self._groups():
            gradients[own] = momenta(gradients[own], states[own], group)


def momenta(gradients: Tensors, states: States, group: Group) -> Tensors:
    """Return beta1 ``exp_avg`` + (1 - beta1) gradient, without a change of the state."""
    return list(torch._foreach_lerp(values(states, "exp_avg"), gradients, 1 - group["betas"][0]))


def denominators(v: Tensors, group: Group) -> Tensors:
    """Return sqrt(v) + eps, with a tiny number for an eps of 0, so that no element is 0."""
    return roots(v, max(group["eps"], TINY))


def directions(m: Tensors, v: Tensors, divisors: Tensors) -> Tensors:
    """Return m / divisors, and 0 where v is 0: there, m may differ from 0, as signs have no 0."""
    result = torch._foreach_sign(v)
    torch._foreach_mul_(result, m)
    torch._foreach_div_(result, divisors)
    return list(result)
