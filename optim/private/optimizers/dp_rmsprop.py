"""RMSProp on noised gradients."""

import torch
from torch.optim.optimizer import ParamsT

from comm_hooks.optim.base import Group, Tensors
from comm_hooks.optim.moments import average_squares_, roots
from comm_hooks.optim.private.optimizers.descent import Descent


class DPRMSProp(Descent):
    """RMSProp whose second moment comes from noised gradients: the plain way, and a baseline.

    With g the noised mean in ``p.grad`` and v = 0 at first:

    1. v = beta v + (1 - beta) g^2;
    2. theta = (1 - lr weight_decay) theta - lr b, with b = momentum b + g / (sqrt(v) + eps).

    Where the noise is larger than the gradients, v is the same for all coordinates, and this is
    DP-SGD with another learning rate.  What remains adaptive at equal noise is
    :class:`~comm_hooks.optim.private.AdaDPS`, :class:`~comm_hooks.optim.private.DP2` or
    :class:`~comm_hooks.optim.private.DPAdamBC`.

    Source: the baseline of Li et al., ICML 2022, Table 6.

    Args:
        params, lr, momentum, weight_decay: see :class:`~comm_hooks.optim.private.NoisedOptimizer`.
        betas: one number, beta, in [0, 1).
        eps: added to sqrt(v); positive.

    State per parameter: ``exp_avg_sq`` (v) and, with momentum, ``momentum_buffer`` (b).

    Example::

        >>> from comm_hooks.optim.private.optimizers.dp_rmsprop import DPRMSProp
        >>> optimizer = DPRMSProp(model.named_parameters(), lr=1e-3)
        >>> for p in model.parameters():  # what the engine does
        ...     p.grad = 0.01 * torch.randn_like(p)
        >>> optimizer.step()
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
            params,
            {
                "lr": lr,
                "betas": betas,
                "eps": eps,
                "momentum": momentum,
                "weight_decay": weight_decay,
            },
        )

    def _directions(self, parameters: Tensors, gradients: Tensors, group: Group) -> Tensors:
        v = self._buffers(parameters, "exp_avg_sq")
        average_squares_(v, gradients, group["betas"][0])
        return list(torch._foreach_div(gradients, roots(v, group["eps"])))
