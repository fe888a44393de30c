"""Scale-then-privatize: Adam that scales gradients before they are clipped and noised."""

from typing import ClassVar

import torch
from torch.optim.optimizer import ParamsT

from comm_hooks.optim.base import Group, Tensors
from comm_hooks.optim.moments import average_, average_squares_, corrected, roots
from comm_hooks.optim.private.optimizers.descent import Descent, Factors, buffers


class ScaleThenPrivatize(Descent):
    r"""Adam that scales gradients by its own earlier moments before they are clipped and noised.

    Needs no public data: the scale comes from gradients that were released before.  With g_i the
    gradient of sample i, C the clipping norm, sigma the noise multiplier, B the public divisor and
    v_hat = v / (1 - beta2^t) that of the step before (0 at first), a step is

    1. s = 1 / (sqrt(v_hat) + scale_eps);
    2. h = (sum_i clip(s g_i, C) + N(0, sigma^2 C^2)) / B;
    3. g = h / s;
    4. m = beta1 m + (1 - beta1) g,  v = beta2 v + (1 - beta2) g^2;
    5. theta = (1 - lr weight_decay) theta
       - lr (m / (1 - beta1^t)) / (sqrt(v / (1 - beta2^t)) + eps).

    The clipper of per-sample gradients and the mechanism do step 2: they call :meth:`transform`
    and leave h in ``p.grad``.  The guarantee is that of DP-SGD with the same C, sigma and sampling.

    C belongs to the scaled space, in which gradients of d coordinates have norms of the order of
    sqrt(d), and a coordinate is multiplied by 1 / ``scale_eps`` at most.  Tune both together: with
    a small C this is DP-Adam with the clipping norm C ``scale_eps``.  And sigma C / B must stay
    below 1: the noise of g is sigma C / B times (sqrt(v_hat) + ``scale_eps``), so from 1
    on the noise makes v grow without end.

    Source: Ganesh, McMahan & Thakurta, "On Design Principles for Private Adaptive Optimizers",
    2025, Algorithm 8 (with bias-corrected v in step 1); the idea is AdaDPS's and DP^2's (Li et al.,
    2022 and 2023).  The baseline of that name in the published code of DP-MicroAdam is another
    algorithm: it never scales before clipping, and only divides noised gradients by s.

    Args:
        params, lr, betas, weight_decay: see :class:`~comm_hooks.optim.private.NoisedOptimizer`.
        eps: Adam's eps in step 5; positive.
        scale_eps: added to sqrt(v_hat) in step 1; positive.

    State per parameter: ``step``, ``exp_avg`` (m), ``exp_avg_sq`` (v).

    Example::

        >>> from comm_hooks.optim.private import ScaleThenPrivatize
        >>> optimizer = ScaleThenPrivatize(model.named_parameters(), lr=1e-3, scale_eps=1e-2)
        >>> round(float(optimizer.transform().scale[0].max()))
        100
    """

    _positive: ClassVar[tuple[str, ...]] = ("eps", "scale_eps")
    _scales_before_clipping: ClassVar[bool] = True

    def __init__(
        self,
        params: ParamsT,
        lr: float,
        *,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        scale_eps: float = 1e-3,
        weight_decay: float = 0.0,
    ) -> None:
        super().__init__(
            params, lr=lr, betas=betas, eps=eps, scale_eps=scale_eps, weight_decay=weight_decay
        )

    def _factors(self, parameters: Tensors, group: Group) -> Factors:
        return list(torch._foreach_reciprocal(self._unscales(parameters, group))), None

    def _unscales(self, parameters: Tensors, group: Group) -> Tensors:
        """Return 1 / s = sqrt(v_hat) + scale_eps, with v_hat before the step."""
        steps = [max(1, int(self._steps(p))) for p in parameters]
        v_hat = corrected(buffers(self, parameters, "exp_avg_sq"), group["betas"][1], steps)
        return roots(v_hat, group["scale_eps"])

    def _directions(self, parameters: Tensors, gradients: Tensors, group: Group) -> Tensors:
        beta1, beta2 = group["betas"]
        unscaled = list(torch._foreach_mul(gradients, self._unscales(parameters, group)))
        steps = self._count(parameters)
        m, v = buffers(self, parameters, "exp_avg"), buffers(self, parameters, "exp_avg_sq")
        average_(m, unscaled, beta1)
        average_squares_(v, unscaled, beta2)
        divisors = roots(corrected(v, beta2, steps), group["eps"])
        torch._foreach_mul_(divisors, [1 - beta1**t for t in steps])
        return list(torch._foreach_div(m, divisors))
