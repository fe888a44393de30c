"""Adam for sparse arrivals: ranks divide by their own second moment before they exchange."""

import torch
from torch.optim.optimizer import ParamsT

from comm_hooks.exchange import Exchange
from comm_hooks.optim.exchanging import ExchangingOptimizer
from comm_hooks.optim.hyperparameters import check_hyperparameters


class LocalVarianceAdam(ExchangingOptimizer):
    r"""Adam whose second moments stay on their ranks, alive, and whose server is linear.

    The trouble with Adam behind a sparse compressor is the division by sqrt(v) *after* the
    exchange.  Error feedback promises that what arrives adds up to what was computed: a coordinate
    that is sent once in 64 steps brings the sum of its 64 gradients.  But m / sqrt(v) is not
    linear.  Both grow with the pulse, which moves the parameter by some 6 learning rates where 64
    small gradients would have moved it by 64.  Freezing v (1-bit Adam, ``CompressedAdam``) makes
    the server linear, at the price of a warm-up and of a v that gets stale.  Here the division
    comes *before* the exchange, where gradients are dense.  Per step, on rank i:

    1. v_i = beta2 v_i + (1 - beta2) g_i^2,  v-hat_i = v_i / (1 - beta2^t);
    2. u_i = g_i / (sqrt(v-hat_i) + eps),  n_i = beta1 n + (1 - beta1) u_i, n being the same on all
       ranks;
    3. n = the exchange's mean of n_i, error feedback included;
    4. theta = theta - lr (n / (1 - beta1^t) + weight_decay theta).

    From step 2 on everything is linear and in units of the learning rate.  With a residual e_i and
    no compression beyond it, summing over t gives

        sum of n  =  mean_i (sum of u_i)  -  (mean_i e_i + beta1 n) / (1 - beta1):

    what is applied over time is what was computed, but for what still waits.  v_i sees every
    gradient of its rank, so there is no warm-up and nothing to freeze or to exchange.  Signs
    (:class:`~comm_hooks.Sign`) profit as well: normalized momenta are of one magnitude, which is
    all that a block's scale can express.

    The momentum has to be the shared one of step 2.  Compressing u_i and letting the server average
    over time fails, although it is as linear: the largest of accumulated u_i are noise.

    Without compression this is not AdamW to the letter: ranks normalize by their own noise, and the
    momentum is of normalized gradients (as in LaProp, Ziyin et al., 2020).

    Args:
        params: parameters, or better ``model.named_parameters()``: saved residuals are then tied to
            names.
        exchange: how momenta are averaged; with error feedback if its compressor is biased.
        lr: learning rate.
        betas: decay of the first and the second moment.
        eps: added to the denominator.
        weight_decay: decoupled (AdamW).

    State per parameter: ``step`` and ``exp_avg`` (n), float32, the same on all ranks, and
    ``exp_avg_sq`` (v_i), float32, **this rank's own**: save the optimizer's state on every rank, as
    the exchange's.

    Cost: one collective per step, and one number read back from the device.

    Raises:
        ValueError: for hyperparameters out of range.

    Not supported: sparse gradients, parameters on several devices, ``capturable``.

    Example::

        >>> from comm_hooks import ErrorFeedback, Exchange, TopK, skip_hook
        >>> from comm_hooks.optim import LocalVarianceAdam
        >>> ddp_model.register_comm_hook(None, skip_hook)
        >>> exchange = Exchange(TopK(density=1 / 64, value_bits=1), memory=ErrorFeedback())
        >>> optimizer = LocalVarianceAdam(ddp_model.named_parameters(), exchange, lr=1e-3)
    """

    def __init__(
        self,
        params: ParamsT,
        exchange: Exchange,
        *,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
    ) -> None:
        check_hyperparameters(self, betas=betas, lr=lr, eps=eps, weight_decay=weight_decay)
        defaults = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay}
        super().__init__(params, defaults, exchange, {})

    def _step(self, gradients: list[torch.Tensor]) -> None:
        states = self._states("exp_avg", "exp_avg_sq")
        t = int(states[0]["step"]) + 1
        variances: list[torch.Tensor] = []
        momenta: list[torch.Tensor] = []
        for own, group in self._groups():
            beta1, beta2 = group["betas"]
            new = gradients[own]
            v = torch._foreach_mul([s["exp_avg_sq"] for s in states[own]], beta2)
            torch._foreach_addcmul_(v, new, new, value=1 - beta2)
            roots = torch._foreach_sqrt(v)
            torch._foreach_div_(roots, (1 - beta2**t) ** 0.5)
            torch._foreach_add_(roots, group["eps"])
            torch._foreach_div_(new, roots)
            momenta += torch._foreach_lerp([s["exp_avg"] for s in states[own]], new, 1 - beta1)
            variances += v
        if not self._average(self._named(momenta)):
            return
        torch._foreach_copy_([s["exp_avg_sq"] for s in states], variances)
        torch._foreach_copy_([s["exp_avg"] for s in states], momenta)
        torch._foreach_add_([s["step"] for s in states], 1)
        for own, group in self._groups():
            torch._foreach_mul_(group["params"], 1 - group["lr"] * group["weight_decay"])
            torch._foreach_add_(
                group["params"], momenta[own], alpha=-group["lr"] / (1 - group["betas"][0] ** t)
            )
