"""SGD on noised gradients."""

from torch.optim.optimizer import ParamsT

from comm_hooks.optim.base import Group
from comm_hooks.optim.private.optimizers.descent import Descent


class DPSGD(Descent):
    r"""DP-SGD's update: gradient descent, with momentum if you like, on the noised gradient.

    With g the noised mean of clipped gradients in ``p.grad`` and b = 0 at first:

    1. theta = (1 - lr weight_decay) theta;
    2. b = momentum b + g;
    3. theta = theta - lr b, or theta - lr (g + momentum b) with ``nesterov``.

    This is :class:`torch.optim.SGD`, which can be used as well, but for the weight decay.  Theirs
    adds weight_decay theta to g and so to the momentum; here, as in AdamW, it stays apart.  Without
    momentum both are the same.

    Source: Abadi et al., CCS 2016, Algorithm 1, line "Descent"; with momentum it is DP-SGDM in
    Tang, Shpilevskiy & Lecuyer, "DP-AdamBC", section 3.

    Args:
        params, lr, momentum, weight_decay: see :class:`~comm_hooks.optim.private.NoisedOptimizer`.
        nesterov: look ahead; only with momentum.

    State per parameter: with momentum ``momentum_buffer`` (b); no ``step``.

    Not supported: dampening.

    Example::

        >>> import torch
        >>> from comm_hooks.optim.private import DPSGD
        >>> optimizer = DPSGD(model.named_parameters(), lr=0.5, momentum=0.9)
        >>> for p in model.parameters():  # what the engine does
        ...     p.grad = 0.01 * torch.randn_like(p)
        >>> optimizer.step()
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
            params,
            {"lr": lr, "momentum": momentum, "nesterov": nesterov, "weight_decay": weight_decay},
        )

    def _check_group(self, settings: Group) -> None:
        super()._check_group(settings)
        if settings["nesterov"] and not settings["momentum"]:
            raise ValueError("DPSGD: nesterov needs momentum: set momentum=0.9, say")
