"""SGD and RMSProp on noised gradients."""

import torch
from torch.optim.optimizer import ParamsT

from comm_hooks.optim.base import Group, Tensors
from comm_hooks.optim.moments import average_squares_, roots
from comm_hooks.optim.private.optimizers.descent import Descent, buffers


class DPSGD(Descent):
    r"""DP-SGD's update: gradient descent on the noised gradient, with or without momentum.

    With g the noised mean of clipped gradients in ``p.grad`` and b = 0 at first:

    1. theta = (1 - lr weight_decay) theta;
    2. b = momentum b + g;
    3. theta = theta - lr b, or theta - lr (g + momentum b) with ``nesterov``.

    :class:`torch.optim.SGD` can be used as well; it adds weight_decay theta to g and so to the
    momentum, where this class, as AdamW, keeps the decay apart.  Without momentum both are equal.

    Source: Abadi et al., CCS 2016, Algorithm 1, line "Descent"; with momentum it is DP-SGDM in
    Tang, Shpilevskiy & Lecuyer, "DP-AdamBC", section 3.

    Args:
        params, lr, momentum, weight_decay: see :class:`~comm_hooks.optim.private.NoisedOptimizer`.
        nesterov: whether to step along g + momentum b (step 3); only with momentum.

    State per parameter: with momentum ``momentum_buffer`` (b); no ``step``.

    Not supported: dampening.

    Example::

        >>> from comm_hooks.optim.private import DPSGD
        >>> optimizer = DPSGD(model.named_parameters(), lr=0.5, momentum=0.9)
    """

    def __init__(
        self,
        params: ParamsT,
        lr: float,
        *,
        momentum: float = 0.0,
        nesterov: bool = False,
        weight_decay: float = 0.0,
    ) -> None:
        super().__init__(
            params, lr=lr, momentum=momentum, nesterov=nesterov, weight_decay=weight_decay
        )

    def _check_group(self, settings: Group) -> None:
        super()._check_group(settings)
        if settings["nesterov"] and not settings["momentum"]:
            raise ValueError("DPSGD: nesterov needs momentum: set momentum=0.9, say")


class DPRMSProp(Descent):
    """RMSProp with a second moment of noised gradients: a baseline.

    With g the noised mean in ``p.grad`` and v = 0 at first:

    1. v = beta v + (1 - beta) g^2;
    2. theta = (1 - lr weight_decay) theta - lr b, with b = momentum b + g / (sqrt(v) + eps).

    Where the noise is larger than the gradients, v is the same for all coordinates, and this is
    DP-SGD with another learning rate.  :class:`~comm_hooks.optim.private.AdaDPS`,
    :class:`~comm_hooks.optim.private.DP2` and :class:`~comm_hooks.optim.private.DPAdamBC` stay
    adaptive at equal noise.

    Source: the baseline of Li et al., ICML 2022, Table 6.

    Args:
        params, lr, momentum, weight_decay: see :class:`~comm_hooks.optim.private.NoisedOptimizer`.
        betas: one number, beta, in [0, 1).
        eps: added to sqrt(v); positive.

    State per parameter: ``exp_avg_sq`` (v) and, with momentum, ``momentum_buffer`` (b).

    Example::

        >>> from comm_hooks.optim.private import DPRMSProp
        >>> optimizer = DPRMSProp(model.named_parameters(), lr=1e-3)
    """

    _beta_count = 1

    def __init__(
        self,
        params: ParamsT,
        lr: float,
        *,
        betas: tuple[float] = (0.99,),
        eps: float = 1e-8,
        momentum: float = 0.0,
        weight_decay: float = 0.0,
    ) -> None:
        super().__init__(
            params, lr=lr, betas=betas, eps=eps, momentum=momentum, weight_decay=weight_decay
        )

    def _directions(self, parameters: Tensors, gradients: Tensors, group: Group) -> Tensors:
        v = buffers(self, parameters, "exp_avg_sq")
        average_squares_(v, gradients, group["betas"][0])
        return list(torch._foreach_div(gradients, roots(v, group["eps"])))
