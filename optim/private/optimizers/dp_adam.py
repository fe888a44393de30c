"""Adam on noised gradients, with and without a correction of the second moment for the noise."""

import math
from collections.abc import Sequence
from typing import ClassVar

import torch
from torch.optim.optimizer import ParamsT

from comm_hooks.optim.base import Group, Tensors
from comm_hooks.optim.hyperparameters import check_hyperparameters
from comm_hooks.optim.moments import average_, average_squares_, corrected, decay_
from comm_hooks.optim.private.optimizers.descent import Descent, buffers
from comm_hooks.requirements import require_within

# Adam's usual eps is 1e-8; this is its square, for floors under a root.
_SMALLEST_GAMMA = 1e-16


class MomentsOptimizer(Descent):
    """Adam's step on noised gradients; a subclass may replace the divisor (:meth:`_divisors`)."""

    _positive: ClassVar[tuple[str, ...]] = ()

    def _divisors(
        self, seconds: Tensors, steps: list[int], members: Tensors, group: Group
    ) -> Tensors:
        """Replace corrected second moments v / (1 - beta2^t), ``seconds``, by the step's divisors.

        The step is m / (1 - beta1^t) over the divisor, m being the first moment; ``steps`` holds t
        for each parameter in ``members``.
        """
        torch._foreach_sqrt_(seconds)
        torch._foreach_add_(seconds, group["eps"])
        return seconds

    def _move(self, x: Tensors, gradients: Tensors, parameters: Tensors, group: Group) -> None:
        beta1, beta2 = group["betas"]
        steps = self._count(parameters)
        m, v = buffers(self, parameters, "exp_avg"), buffers(self, parameters, "exp_avg_sq")
        average_(m, gradients, beta1)
        average_squares_(v, gradients, beta2)
        divisors = self._divisors(corrected(v, beta2, steps), steps, parameters, group)
        decay_(x, group)
        torch._foreach_addcdiv_(x, m, divisors, [-group["lr"] / (1 - beta1**t) for t in steps])


class DPAdam(MomentsOptimizer):
    r"""Adam on the noised gradient.

    With g the noised mean of clipped gradients in ``p.grad`` and m = v = 0 at first:

    1. m = beta1 m + (1 - beta1) g;
    2. v = beta2 v + (1 - beta2) g^2;
    3. theta = (1 - lr weight_decay) theta - lr m_hat / (sqrt(v_hat) + eps),
       where m_hat = m / (1 - beta1^t) and v_hat = v / (1 - beta2^t).

    This is :class:`torch.optim.AdamW`, which can be used as well.  v estimates the second moment of
    the gradient *plus* Phi, the variance of the noise.  Where Phi is much the larger, v_hat is Phi
    in all coordinates and nothing adapts: the step is that of :class:`DPSGD` with momentum beta1
    and the learning rate lr (1 - beta1) / ((1 - beta1^t) sqrt(Phi)).  :class:`DPAdamBC` subtracts
    Phi.

    Source: Adam is Kingma & Ba, ICLR 2015; decoupled weight decay is Loshchilov & Hutter, ICLR
    2019; the relation to DP-SGD is Tang, Shpilevskiy & Lecuyer, "DP-AdamBC", section 3, equation 3.

    Args:
        params, lr, betas, eps, weight_decay: see
            :class:`~comm_hooks.optim.private.NoisedOptimizer`.

    State per parameter: ``step``, ``exp_avg`` (m) and ``exp_avg_sq`` (v).

    Not supported: AMSGrad.

    Example::

        >>> from comm_hooks.optim.private import DPAdam
        >>> optimizer = DPAdam(model.named_parameters(), lr=1e-3)
        >>> for p in model.parameters():  # the engine does this
        ...     p.grad = 0.01 * torch.randn_like(p)
        >>> optimizer.step()
    """

    def __init__(
        self,
        params: ParamsT,
        lr: float = 1e-3,
        *,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
    ) -> None:
        super().__init__(params, lr=lr, betas=betas, eps=eps, weight_decay=weight_decay)


class DPAdamBC(MomentsOptimizer):
    r"""Adam on the noised gradient, with the noise variance subtracted from the second moment.

    With g the noised mean of clipped gradients in ``p.grad``, Phi the variance of the noise in one
    of its coordinates (``noise_variance``), and m = v = phi = 0 at first:

    1. m = beta1 m + (1 - beta1) g;
    2. v = beta2 v + (1 - beta2) g^2 and, one number, phi = beta2 phi + (1 - beta2) Phi;
    3. m_hat = m / (1 - beta1^t), v_hat = v / (1 - beta2^t), phi_hat = phi / (1 - beta2^t);
    4. theta = (1 - lr weight_decay) theta - lr m_hat / sqrt(max(v_hat - phi_hat, gamma)).

    phi_hat is the contribution of the noise to v_hat, also while Phi changes, so v_hat - phi_hat is
    unbiased for the second moment of the gradient without noise.  In a single coordinate the noise
    in v_hat has a relative standard deviation of 3 % after many steps with beta2 = 0.999.  In
    coordinates with weaker gradients the floor gamma decides; see :func:`suggested_gamma`.

    The engine sets ``noise_variance`` before every step to the variance of the added noise; without
    an engine set it yourself.  With noise multiplier sigma, clipping norm C and one noise for all
    ranks it is (sigma C / B)^2, B being the divisor of the gradient.

    Unlike the authors' code, no moments of gradients without noise are kept (a checkpoint of theirs
    leaks them), weight decay never enters the moments, and B is exact (theirs is off by one).

    Source: Tang, Shpilevskiy & Lecuyer, "DP-AdamBC: Your DP-Adam Is Actually DP-SGD", AAAI 2024,
    Algorithm 1 and equation 4.  A Phi that changes is ours.

    Args:
        params, lr, betas, weight_decay: see :class:`~comm_hooks.optim.private.NoisedOptimizer`.
        gamma: the floor under the root, the paper's gamma', in units of a squared gradient; None
            for ``suggested_gamma(phi_hat, beta2)``, at least 1e-16.

    State per parameter: ``step``, ``noise_avg`` (phi), a Python number, ``exp_avg`` (m) and
    ``exp_avg_sq`` (v).

    Raises:
        RuntimeError: in a step for which the variance of the noise is not known.

    Not supported: gradients that went through top-k or another compressor that picks elements by
    their size, since no one number corrects their v; AMSGrad.

    Example::

        >>> from comm_hooks.optim.private import DPAdamBC
        >>> optimizer = DPAdamBC(model.named_parameters(), lr=1e-3)
        >>> optimizer.noise_variance = 0.01**2  # this and the gradients come from the engine
        >>> for p in model.parameters():
        ...     p.grad = 0.01 * torch.randn_like(p)
        >>> optimizer.step()
    """

    needs_noise_variance: ClassVar[bool] = True

    def __init__(
        self,
        params: ParamsT,
        lr: float = 1e-3,
        *,
        betas: tuple[float, float] = (0.9, 0.999),
        gamma: float | None = None,
        weight_decay: float = 0.0,
    ) -> None:
        super().__init__(params, lr=lr, betas=betas, gamma=gamma, weight_decay=weight_decay)

    def _check_group(self, settings: Group) -> None:
        super()._check_group(settings)
        if settings["gamma"] is not None:
            require_within(self, "gamma", settings["gamma"], "(0, inf)")

    def _check_step(self, gradients: Sequence[torch.Tensor]) -> None:
        super()._check_step(gradients)
        if self.noise_variance is None:
            raise RuntimeError(
                "DPAdamBC: noise_variance is not known, and DPAdamBC subtracts it: train with a "
                "PrivacyEngine and a compressor that keeps the noise Gaussian, or set "
                "optimizer.noise_variance to the variance in one coordinate of p.grad"
            )
        check_hyperparameters(self, noise_variance=self.noise_variance)

    def _divisors(
        self, seconds: Tensors, steps: list[int], members: Tensors, group: Group
    ) -> Tensors:
        assert self.noise_variance is not None
        _, beta2 = group["betas"]
        variances = []
        for parameter, t in zip(members, steps, strict=True):
            state = self.state[parameter]
            average = beta2 * state.get("noise_avg", 0.0) + (1 - beta2) * self.noise_variance
            state["noise_avg"] = average
            variances.append(average / (1 - beta2**t))
        gamma = group["gamma"]
        floors = [
            max(suggested_gamma(variance, beta2), _SMALLEST_GAMMA) if gamma is None else gamma
            for variance in variances
        ]
        torch._foreach_sub_(seconds, variances)
        torch._foreach_clamp_min_(seconds, floors)
        torch._foreach_sqrt_(seconds)
        return seconds


def suggested_gamma(
    noise_variance: float, beta2: float = 0.999, *, steps: int | None = None, alpha: float = 0.05
) -> float:
    r"""Return a floor gamma for DPAdamBC: a bound of the noise in its second moment v_hat.

    With a lower floor the noise decides the size of steps.  After t steps with the variance Phi,
    v_hat - Phi is off by less than the bound with a probability of at least 1 - alpha:

        xi = (1 - beta2) / (1 - beta2^t) max(nu sqrt(2 ln(2 / alpha)), 2 b ln(2 / alpha)),
        nu = 4 Phi sqrt((1 - beta2^(2t)) / (1 - beta2^2)),  b = 4 Phi.

    With the defaults it is 0.243 Phi, four times the measured deviation.  The authors tuned gamma
    between 0.004 Phi and 0.84 Phi, depending on the task; so should you.

    Source: Tang, Shpilevskiy & Lecuyer, "DP-AdamBC", section 4, Proposition 3, which holds for
    gradients much smaller than the noise.  Its two cases are the two arguments of max.

    Args:
        noise_variance: Phi, the variance of the noise in one coordinate of the gradient.
        beta2: the decay rate of the second moment, in [0, 1).
        steps: t, the number of steps; None for the limit of many.
        alpha: the probability of a larger deviation, in (0, 1).

    Raises:
        ValueError: for arguments out of range.

    Example::

        >>> from comm_hooks.optim.private import suggested_gamma
        >>> f"{suggested_gamma((0.4 * 0.1 / 256) ** 2):.3e}"
        '5.933e-09'
    """
    require_within("suggested_gamma", "noise_variance", noise_variance, "[0, inf)")
    require_within("suggested_gamma", "beta2", beta2, "[0, 1)")
    require_within("suggested_gamma", "alpha", alpha, "(0, 1)")
    if steps is not None:
        require_within("suggested_gamma", "steps", steps, "[1, inf)")
    remaining = 0.0 if steps is None else beta2**steps
    log = math.log(2 / alpha)
    nu = 4 * noise_variance * math.sqrt((1 - remaining**2) / (1 - beta2**2))
    deviation = max(nu * math.sqrt(2 * log), 2 * 4 * noise_variance * log)
    return (1 - beta2) / (1 - remaining) * deviation
