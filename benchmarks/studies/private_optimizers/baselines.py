"""Other private optimizers that use public gradients: baselines for AdaDPS."""

import math
from collections.abc import Callable

import torch
from torch.optim.optimizer import ParamsT

from comm_hooks.optim.base import Group, Tensors
from comm_hooks.optim.moments import average_, corrected
from comm_hooks.optim.private.optimizers.descent import (
    Descent,
    PublicDescent,
    PublicTensors,
    buffers,
    in_order,
)
from comm_hooks.requirements import require_callable, require_positive, require_within


class DPRPub(PublicDescent):
    r"""DP-R-Pub: RMSProp on noised gradients, with a preconditioner from public gradients.

    AdaDPS in the other order: noise first, then the division.  With g the noised mean in ``p.grad``
    and ghat the gradient of a public batch:

    1. v = beta v + (1 - beta) ghat^2;
    2. theta = (1 - lr weight_decay) theta - lr b, with b = momentum b + g / (sqrt(v) + eps).

    Step 2 enlarges the noise in the coordinates with small gradients.

    Source: Li et al., ICML 2022, Section 6.1.1.

    Args:
        params, lr, momentum, weight_decay: see :class:`~comm_hooks.optim.private.NoisedOptimizer`.
        public_gradients: called once per step; see :class:`~comm_hooks.optim.private.AdaDPS`.
        beta: the decay rate of v, in [0, 1).
        eps: added to sqrt(v); positive.

    State per parameter: that of AdaDPS.
    """

    def __init__(
        self,
        params: ParamsT,
        lr: float,
        public_gradients: Callable[[], PublicTensors],
        *,
        beta: float = 0.99,
        eps: float = 1e-3,
        momentum: float = 0.0,
        weight_decay: float = 0.0,
    ) -> None:
        require_within(self, "beta", beta, "[0, 1)")
        super().__init__(
            params,
            public_gradients,
            lr=lr,
            betas=(0.0, beta),
            eps=eps,
            momentum=momentum,
            weight_decay=weight_decay,
        )


class DPAdamPub(PublicDescent):
    r"""DP-Adam-Pub: Adam on a mix of noised and public gradients, with v of public gradients.

    With g the noised mean in ``p.grad`` and ghat the gradient of a public batch:

    1. m = beta2 m + (1 - beta2) (beta1 g + (1 - beta1) ghat);
    2. v = beta3 v + (1 - beta3) ghat^2;
    3. theta = (1 - lr weight_decay) theta
       - lr (m / (1 - beta2^t)) / (sqrt(v / (1 - beta3^t)) + eps).

    Source: Li et al., ICML 2022, Appendix C.1, which writes m^t and v^t for the moments before.

    Args:
        params, lr, weight_decay: see :class:`~comm_hooks.optim.private.NoisedOptimizer`.
        public_gradients: called once per step; see :class:`~comm_hooks.optim.private.AdaDPS`.
        betas: beta1, beta2 and beta3, each in [0, 1); the paper gives no values.
        eps: added to the denominator; positive.

    State per parameter: ``step``, ``exp_avg`` (m), ``public_exp_avg_sq`` (v).
    """

    _beta_count = 3

    def __init__(
        self,
        params: ParamsT,
        lr: float,
        public_gradients: Callable[[], PublicTensors],
        *,
        betas: tuple[float, float, float] = (0.9, 0.9, 0.999),
        eps: float = 1e-3,
        weight_decay: float = 0.0,
    ) -> None:
        super().__init__(
            params, public_gradients, lr=lr, betas=betas, eps=eps, weight_decay=weight_decay
        )

    def _directions(self, parameters: Tensors, gradients: Tensors, group: Group) -> Tensors:
        beta1, beta2, beta3 = group["betas"]
        public = [self._public[p] for p in parameters]
        steps = self._count(parameters)
        firsts = buffers(self, parameters, "exp_avg")
        average_(firsts, list(torch._foreach_lerp(public, gradients, beta1)), beta2)
        divisors = corrected(buffers(self, parameters, "public_exp_avg_sq"), beta3, steps)
        torch._foreach_sqrt_(divisors)
        torch._foreach_add_(divisors, group["eps"])
        torch._foreach_mul_(divisors, [1 - beta2**t for t in steps])
        return list(torch._foreach_div(firsts, divisors))


class PDADPMD(Descent):
    r"""PDA-DPMD: descent along a convex combination of noised and public gradients.

    With g the noised mean in ``p.grad``, ghat the gradient of a public batch and t = 0, 1, ...:

    1. alpha = cos(pi t / (2 total_steps)), 0 after that;
    2. u = alpha g + (1 - alpha) ghat;
    3. theta = (1 - lr weight_decay) theta - lr b, with b = momentum b + u.

    It starts with private gradients alone and ends with public ones, which have no noise.  Stop
    after ``total_steps``: from there on private gradients cost privacy and are not used.

    Source: Amid et al., "Public Data-Assisted Mirror Descent for Private Model Training", 2021: the
    first-order approximation of mirror descent with the public loss as the mirror map.  ghat is not
    clipped, as in the code of AdaDPS (Li et al., ICML 2022, Table 2).

    Args:
        params, lr, momentum, weight_decay: see :class:`~comm_hooks.optim.private.NoisedOptimizer`.
        public_gradients: called once per step; see :class:`~comm_hooks.optim.private.AdaDPS`.
        total_steps: the number of steps of the run, at least 1.

    State per parameter: ``step`` (t), ``momentum_buffer`` (b) with momentum.
    """

    def __init__(
        self,
        params: ParamsT,
        lr: float,
        public_gradients: Callable[[], PublicTensors],
        *,
        total_steps: int,
        momentum: float = 0.0,
        weight_decay: float = 0.0,
    ) -> None:
        require_callable(self, "public_gradients", public_gradients)
        require_positive(self, "total_steps", total_steps)
        super().__init__(params, lr=lr, momentum=momentum, weight_decay=weight_decay)
        self.total_steps = total_steps
        self._public_gradients = public_gradients

    def _observe(self) -> None:
        self._public = in_order(self, "public_gradients", self._public_gradients())

    def _directions(self, parameters: Tensors, gradients: Tensors, group: Group) -> Tensors:
        shares = [min((t - 1) / self.total_steps, 1.0) for t in self._count(parameters)]
        return [
            self._public[parameter].lerp(gradient, math.cos(math.pi / 2 * share))
            for parameter, gradient, share in zip(parameters, gradients, shares, strict=True)
        ]
