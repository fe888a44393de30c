"""DP^2: a preconditioner from averages over many noised gradients, which have less noise."""

from collections.abc import Sequence
from typing import ClassVar, Literal

import torch
from torch.optim.optimizer import ParamsT

from comm_hooks.optim.base import Group, Tensors
from comm_hooks.optim.moments import average_squares_, roots
from comm_hooks.optim.private.optimizers.descent import Descent, Factors, buffers
from comm_hooks.requirements import require_choice, require_positive, require_within


class DP2(Descent):
    r"""DP^2: phases of DP-SGD alternate with phases of preconditioned DP-SGD.

    Needs no public data: averages over ``sgd_steps`` noised gradients have ``sgd_steps`` times less
    noise in their variance than one of them, and the geometry of the gradients changes slowly.
    g_i is the gradient of sample i, C the clipping norm, sigma the noise multiplier and B the
    public divisor; v = G = 0 at first.  Again and again,

    ``sgd_steps`` times:

    1. g = (sum_i clip(g_i, C) + N(0, sigma^2 C^2)) / B;
    2. G = G + g;
    3. theta = (1 - lr weight_decay) theta - lr g;

    then v = beta v + (1 - beta) (G / sgd_steps)^2 ("adagrad": v = v + (G / sgd_steps)^2), G = 0 and
    D = sqrt(v) + eps; then ``preconditioned_steps`` times, with C' = clip_ratio C:

    1. g = (sum_i clip(g_i / D, C') + N(0, sigma^2 C'^2)) / B;
    2. theta = (1 - lr weight_decay) theta - lr lr_ratio g.

    The clipper and the mechanism clip and add noise: they call :meth:`transform` and leave the
    noised mean in ``p.grad``.  They use one C.  clip(g, C') with noise sigma C' is clip_ratio times
    clip(g / clip_ratio, C) with noise sigma C, so the ratio is part of the scale, and undone after
    the noise: every step has the sensitivity C and the noise sigma C in its own space, and costs as
    much privacy as a step of DP-SGD.

    Source: Li, Zaheer, Liu, Reddi, McMahan & Smith, "Differentially Private Adaptive Optimization
    with Delayed Preconditioners", ICLR 2023, Algorithm 1.  As in the published code, G grows in the
    first phase only.  That code divides by the actual batch size, and both phases are equally long.

    Args:
        params, weight_decay: see :class:`~comm_hooks.optim.private.NoisedOptimizer`.
        lr: learning rate of the first phase.
        lr_ratio: the second phase's learning rate over ``lr``, positive; schedulers change both.
        clip_ratio: the clipping norm of the second phase over that of the first; positive.
        sgd_steps: the number of steps of the first phase (the paper's s_1), at least 1.
        preconditioned_steps: the number of steps of the second phase (s_2), at least 1.
        preconditioner: "rmsprop" or "adagrad".
        betas: one number, beta, in [0, 1).
        eps: added to sqrt(v); positive.

    State per parameter: ``step``, ``accumulated`` (G), ``exp_avg_sq`` (v).

    Not supported: momentum, which would mix the two spaces.

    Example::

        >>> from comm_hooks.optim.private import DP2
        >>> optimizer = DP2(
        ...     model.named_parameters(), lr=0.1, lr_ratio=0.01, clip_ratio=50.0, sgd_steps=1
        ... )
        >>> for step in range(2):  # the engine does this
        ...     print("DP-SGD" if optimizer.transform() is None else "preconditioned")
        ...     for p in model.parameters():
        ...         p.grad = 0.01 * torch.randn_like(p)
        ...     optimizer.step()
        DP-SGD
        preconditioned
    """

    _beta_count = 1
    _scales_before_clipping: ClassVar[bool] = True

    def __init__(
        self,
        params: ParamsT,
        lr: float,
        *,
        lr_ratio: float = 1.0,
        clip_ratio: float = 1.0,
        sgd_steps: int = 100,
        preconditioned_steps: int = 100,
        preconditioner: Literal["rmsprop", "adagrad"] = "rmsprop",
        betas: tuple[float] = (0.9,),
        eps: float = 1e-3,
        weight_decay: float = 0.0,
    ) -> None:
        require_positive(self, "sgd_steps", sgd_steps)
        require_positive(self, "preconditioned_steps", preconditioned_steps)
        require_within(self, "lr_ratio", lr_ratio, "(0, inf)")
        require_within(self, "clip_ratio", clip_ratio, "(0, inf)")
        require_choice(self, "preconditioner", preconditioner, ("rmsprop", "adagrad"))
        self.lr_ratio = lr_ratio
        self.clip_ratio = clip_ratio
        self.sgd_steps = sgd_steps
        self.preconditioned_steps = preconditioned_steps
        self.preconditioner = preconditioner
        super().__init__(params, lr=lr, betas=betas, eps=eps, weight_decay=weight_decay)

    def _place(self) -> int:
        """Return the number of steps since the DP-SGD phase of the present pair of phases began."""
        taken = max(int(self._steps(p)) for p in self._parameters())
        return taken % (self.sgd_steps + self.preconditioned_steps)

    def _factors(self, parameters: Tensors, group: Group) -> Factors | None:
        if self._place() < self.sgd_steps:
            return None
        divisors = roots(buffers(self, parameters, "exp_avg_sq"), group["eps"])
        torch._foreach_mul_(divisors, self.clip_ratio)
        return list(torch._foreach_reciprocal(divisors)), None

    def _check_step(self, gradients: Sequence[torch.Tensor]) -> None:
        super()._check_step(gradients)
        self._at = self._place()

    def _directions(self, parameters: Tensors, gradients: Tensors, group: Group) -> Tensors:
        self._count(parameters)
        if self._at >= self.sgd_steps:
            return list(torch._foreach_mul(gradients, self.clip_ratio * self.lr_ratio))
        sums = buffers(self, parameters, "accumulated")
        torch._foreach_add_(sums, gradients)
        if self._at == self.sgd_steps - 1:
            seconds = buffers(self, parameters, "exp_avg_sq")
            torch._foreach_div_(sums, self.sgd_steps)
            if self.preconditioner == "adagrad":
                torch._foreach_addcmul_(seconds, sums, sums)
            else:
                average_squares_(seconds, sums, group["betas"][0])
            torch._foreach_zero_(sums)
        return gradients
