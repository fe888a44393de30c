"""Adam for sparse arrivals: ranks divide by their own second moment before they exchange."""

from collections.abc import Callable

import torch
from torch.optim.optimizer import ParamsT

from comm_hooks.exchange import Exchange
from comm_hooks.optim.base import Group, States, Tensors, block
from comm_hooks.optim.exchanging import ExchangingOptimizer
from comm_hooks.optim.moments import along_, count_step, normalized_average_, values


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
        params, lr, eps, weight_decay: see
            :class:`~comm_hooks.optim.exchanging.ExchangingOptimizer`.
        betas: of n and v_i.  What waits in residuals is a momentum of its own, so the horizon of n
            is half of AdamW's: 0.8 instead of 0.9 is worth 0.07 to 0.12 nats, with signs and with
            top-k (``benchmarks/results/tried.md``).
        exchange: how momenta are averaged; with error feedback if its compressor is biased.

    State per parameter: ``exp_avg`` (n), the same on all ranks, and ``exp_avg_sq`` (v_i), **this
    rank's own**: save the optimizer's state on every rank, as the exchange's.

    Memory: v_i has a second buffer of 4 bytes per parameter to compute the next one in; n is
    computed in the workspace of the exchange.

    Example::

        >>> from comm_hooks import ErrorFeedback, Exchange, TopK, skip_hook
        >>> from comm_hooks.optim import LocalVarianceAdam
        >>> ddp_model.register_comm_hook(None, skip_hook)
        >>> exchange = Exchange(TopK(density=1 / 64, value_bits=1), memory=ErrorFeedback())
        >>> optimizer = LocalVarianceAdam(ddp_model.named_parameters(), exchange, lr=1e-3)
    """

    published = block(compressor="topk", density=1 / 64, value_bits=1, memory="error_feedback")

    _overwrites_gradients = False

    def __init__(
        self,
        params: ParamsT,
        exchange: Exchange,
        *,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.8, 0.95),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
    ) -> None:
        defaults = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay}
        super().__init__(params, exchange, defaults)
        # What the next v is computed in, so that a step that is skipped leaves no trace.
        self._spare: Tensors = []

    def _step(self, gradients: Tensors) -> None:
        states = self._states("exp_avg", "exp_avg_sq")
        t = int(states[0]["step"]) + 1
        message = self.exchange.workspace(self._named(values(states, "exp_avg")))
        momenta, variances = list(message.values()), self._next_variances(states)
        torch._foreach_copy_(momenta, values(states, "exp_avg"))
        for own, group in self._groups():
            normalized_average_(momenta[own], gradients[own], variances[own], group, t)
        if not self._average(message):
            return
        torch._foreach_copy_(values(states, "exp_avg"), momenta)
        self._spare = values(states, "exp_avg_sq")
        for state, v in zip(states, variances, strict=True):
            state["exp_avg_sq"] = v
        count_step(states)
        for own, group in self._groups():
            along_(group["params"], momenta[own], group, 1 - group["betas"][0] ** t)

    def _next_variances(self, states: States) -> Tensors:
        """Return copies of v, contiguous as n is in the workspace, to compute in."""
        old = values(states, "exp_avg_sq")
        # A state that was just made or loaded may lie in memory in any order.
        if [v.shape for v in self._spare] != [v.shape for v in old] or any(
            not v.is_contiguous() for v in self._spare
        ):
            self._spare = [torch.empty_like(v, memory_format=torch.contiguous_format) for v in old]
        torch._foreach_copy_(self._spare, old)
        return self._spare


def plain_step(
    parameter: torch.Tensor,
    state: dict[str, torch.Tensor],
    gradient: torch.Tensor,
    mean: Callable[[torch.Tensor], torch.Tensor],
    group: Group,
) -> None:
    """Take the step of :class:`LocalVarianceAdam` on one parameter, as the class describes it.

    The reference that its fused step is tested against.

    Args:
        parameter: float32, updated in place.
        state: ``step``, ``exp_avg`` and ``exp_avg_sq``, replaced.
        gradient: this rank's.
        mean: the exchange's mean over ranks.
        group: the hyperparameters.
    """
    lr, (beta1, beta2) = group["lr"], group["betas"]
    t = state["step"] = state["step"] + 1
    v = state["exp_avg_sq"] = beta2 * state["exp_avg_sq"] + (1 - beta2) * gradient**2
    u = gradient / ((v / (1 - beta2**t)).sqrt() + group["eps"])
    n = state["exp_avg"] = mean(beta1 * state["exp_avg"] + (1 - beta1) * u)
    parameter.sub_(lr * (n / (1 - beta1**t) + group["weight_decay"] * parameter))
