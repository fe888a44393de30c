"""Adam for sparse messages: ranks divide by their own second moment before they exchange."""

import torch
from torch.optim.optimizer import ParamsT

from comm_hooks.exchange import Exchange
from comm_hooks.optim.base import States, Tensors, block, held
from comm_hooks.optim.exchanging import ExchangingOptimizer
from comm_hooks.optim.moments import (
    along_,
    average_,
    count_step,
    normalized_average_,
    values,
    zeros,
)


class LocalVarianceAdam(ExchangingOptimizer):
    r"""Adam with second moments that stay on their ranks, and a linear update after the exchange.

    The trouble with Adam behind a sparse compressor is the division by sqrt(v) *after* the
    exchange.  With error feedback the messages add up to the gradients: a coordinate
    that is sent once in 64 steps brings the sum of its 64 gradients.  But m / sqrt(v) is not
    linear.  Both grow with the pulse, which moves the parameter by some 6 learning rates where 64
    small gradients would have moved it by 64.  Freezing v (1-bit Adam) makes
    the step linear, at the price of a warm-up and of a v that gets outdated.  Here the division
    comes *before* the exchange, where gradients are dense.  Per step, on rank i:

    1. with the gradient g_i, v_i = beta2 v_i + (1 - beta2) g_i^2,  v-hat_i = v_i / (1 - beta2^t);
    2. u_i = g_i / (sqrt(v-hat_i) + eps),  n_i = beta1 n + (1 - beta1) u_i, n the same on all ranks;
    3. n = the exchange's mean of n_i, error feedback included;  n-hat = n / (1 - beta1^t);
    4. q = beta2 q + (1 - beta2) mean(n-hat^2), over all elements of all parameters,
       q-hat = q / (1 - beta2^t), and with c = (1 - beta1) / (1 + beta1)
       s^2 = (N - c) / (1 - c + (N - 1) q-hat), cut to [1, N];
    5. theta = theta - lr (s n-hat + weight_decay theta).

    From step 2 on n is linear and in units of the learning rate.  With a residual e_i and no
    compression beyond it, summing over t gives

        sum of n  =  mean_i (sum of u_i)  -  (mean_i e_i + beta1 n) / (1 - beta1):

    the updates over time add up to the normalized gradients, except for residuals.  v_i sees every
    gradient of its rank, so there is no warm-up and nothing to freeze or to exchange.  Signs
    (:class:`~comm_hooks.Sign`) profit as well: normalized momenta are of one magnitude, which is
    all that a block's scale can express.

    Step 4 gives steps the length of those that Adam takes on the mean gradient.  With a share r of
    signal in the square of a gradient and noise of its own on each of N ranks, Adam divides by
    sqrt(r + (1 - r) / N) of one rank's divisor: by 1 as long as gradients agree, and by up to
    sqrt(N) less as they become noise, which is when a schedule ends.  Here q-hat tells r, since the
    mean square of n-hat is r + (1 - r) c / N, and s = 1 / sqrt(r + (1 - r) / N).  One number for
    all: a parameter's own r would do away with the differences between parameters.

    The momentum has to be the shared one of step 2.  Compressing u_i and averaging over time after
    the exchange fails, although it is as linear: the largest of accumulated u_i are noise.

    Without compression this is not AdamW to the letter: each element is divided by its rank's
    own root mean square, and the momentum is of normalized gradients (as in LaProp, Ziyin et al.,
    2020).  Take AdamW's learning rate.

    Args:
        params, lr, eps, weight_decay: see
            :class:`~comm_hooks.optim.exchanging.ExchangingOptimizer`.
        betas: decay rates of n and v_i.  Residuals act as a momentum, too, so the horizon of n
            is half of AdamW's: with 0.8 instead of 0.9 signs end lower by 0.016 to 0.045 nats,
            exact means by 0.001 to 0.051 (``python -m benchmarks.quality``, four ranks, one seed).
        exchange: the exchange of momenta; with error feedback if its compressor is biased.

    State per parameter: ``exp_avg_normalized`` (n) and ``norm_sq`` (its part of q, float32 without
    a dimension), the same on all ranks, and ``exp_avg_sq`` (v_i), **this rank's own**: save the
    optimizer's state on every rank, as the exchange's.

    Cost: a step's length takes two more passes over n than a step of AdamW, and waits for nothing.

    In a sharded model (FSDP2) each rank computes step 4's q from its own part alone.

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

    own_state = ("exp_avg_sq",)

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
        # The workspace of the next v, so that a skipped step leaves no trace.
        self._spare: Tensors = []

    def _step(self, gradients: Tensors) -> None:
        states = self._states("exp_avg_normalized", "exp_avg_sq")
        t = int(states[0]["step"]) + 1
        message = self.exchange.workspace(self._named(values(states, "exp_avg_normalized")))
        momenta, variances = list(message.values()), self._next_variances(states)
        torch._foreach_copy_(momenta, values(states, "exp_avg_normalized"))
        for own, group in self._groups():
            normalized_average_(momenta[own], gradients[own], variances[own], group, t)
        if not self._average(message):
            return
        torch._foreach_copy_(values(states, "exp_avg_normalized"), momenta)
        self._spare = values(states, "exp_avg_sq")
        for state, v in zip(states, variances, strict=True):
            state["exp_avg_sq"] = v
        count_step(states)
        lengths = self._lengths(states, t)
        for (own, group), length in zip(self._groups(), lengths, strict=True):
            torch._foreach_mul_(momenta[own], length)
            along_(held(group), momenta[own], group, 1 - group["betas"][0] ** t)

    def _lengths(self, states: States, t: int) -> Tensors:
        """Return the factor s of step 4 for each group, as float32 scalars on the device."""
        total: Tensors = []
        for own, group in self._groups():
            beta1, beta2 = group["betas"]
            new = norms_sq(values(states[own], "exp_avg_normalized"), 1 - beta1**t)
            averages = zeros(states[own], "norm_sq", new)
            average_(averages, new, beta2)
            total.append(torch.stack(averages).double().sum() / (1 - beta2**t))
        mean_sq = torch.stack(total).sum() / sum(p.numel() for p in self._parameters())
        ranks = self.exchange.transport.world_size
        return [lengthening(mean_sq, ranks, g["betas"][0]).float() for _, g in self._groups()]

    def _next_variances(self, states: States) -> Tensors:
        """Return contiguous copies of the second moments v, in which the next v is computed."""
        old = values(states, "exp_avg_sq")
        # A state that was just made or loaded may lie in memory in any order.
        if [v.shape for v in self._spare] != [v.shape for v in old] or any(
            not v.is_contiguous() for v in self._spare
        ):
            self._spare = [torch.empty_like(v, memory_format=torch.contiguous_format) for v in old]
        torch._foreach_copy_(self._spare, old)
        return self._spare


def norms_sq(momenta: Tensors, correction: float) -> Tensors:
    """Return the squared norm of each momentum / correction, as float32 scalars.

    The order of a sum depends on the device and its threads.  Computed in float64 and then rounded
    to bfloat16, the norms are the same on all ranks.
    """
    norms = torch.stack(torch._foreach_norm(momenta, 2, dtype=torch.float64)) / correction
    return list(norms.square().to(torch.bfloat16).float().unbind())


def lengthening(mean_sq: torch.Tensor, ranks: int, beta1: float) -> torch.Tensor:
    """Return the factor that lengthens steps along a mean of normalized momenta.

    Args:
        mean_sq: the mean square of the momentum's elements; a tensor of any shape.
        ranks: N, the number of ranks; each normalizes its gradients by its own v.
        beta1: the decay rate of the momentum.

    Returns:
        sqrt((N - c) / (1 - c + (N - 1) mean_sq)), c = (1 - beta1) / (1 + beta1): 1 to sqrt(N).

    Example::

        >>> lengthening(torch.tensor([1.0, 1 / 36]), ranks=4, beta1=0.8)
        tensor([1., 2.])
    """
    if ranks == 1:
        return torch.ones_like(mean_sq)
    c = (1 - beta1) / (1 + beta1)
    # All signal is 1, all noise is c / N.
    power = 1 - c + (ranks - 1) * mean_sq.clamp(c / ranks, 1)
    return ((ranks - c) / power).sqrt()
