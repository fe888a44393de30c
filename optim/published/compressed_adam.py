"""Adam that exchanges compressed momenta, and freezes the shape of v but not its scale."""

import torch
from torch.optim.optimizer import ParamsT

from comm_hooks.exchange import Exchange
from comm_hooks.optim.base import Group, States, Tensors, block, held
from comm_hooks.optim.moments import adamw_, average_, count_step, descend_, roots, values, zeros
from comm_hooks.optim.published.freezing import FreezingOptimizer
from comm_hooks.requirements import require_flag

# Travels with the gradients, under a name that no parameter has.
POWERS = "<mean squares of gradients>"
# Of the mean of a parameter's shape.  Without it, coordinates with a small gradient
# during the warm-up take giant steps later.
FLOOR = 0.1


class CompressedAdam(FreezingOptimizer):
    r"""Adam that averages gradients exactly at first, then exchanges a compressed momentum.

    Biased compressors and Adam do not mix when the *gradient* is compressed: the second moment
    turns a coordinate that arrives in rare pulses into tiny steps, and signs erase the magnitudes
    that Adam adapts to.  1-bit Adam (Tang et al., ICML 2021) avoids both: the second moment v is
    taken from exact gradients, then frozen, and only the momentum, which is linear in the
    gradients, goes through the compressor (:class:`~comm_hooks.optim.OneBitAdam`).  But the first
    gradients of a network are often ten times larger than the later ones; a frozen v is dominated
    by them, and steps stay too small for ever.  Here only the shape of v is frozen.

    :class:`~comm_hooks.optim.LocalVarianceAdam` needs no warm-up and does better at the same bytes;
    this one is for when the second moment must be that of the mean gradient, or state must not
    differ between ranks.

    Steps 1 ... ``freeze_step`` are AdamW on the exact mean g of the ranks' gradients g_i.  Then:

    1. each rank forms m_i = beta1 m + (1 - beta1) g_i, m being the same on all ranks;
    2. with ``scaled``, m_i is divided by s = sqrt(u) + eps: coordinates compete by the size of the
       step that they cause, not by the size of their gradient;
    3. m = the exchange's mean of m_i (error feedback included), times s if ``scaled``;
    4. theta = theta - lr (m-hat / (sqrt(v) + eps) + weight_decay theta), m-hat = m / (1 - beta1^t).

    From then on v = u p-hat, a frozen shape times a living scale.  The scale p is, for each
    parameter tensor, the moving average (beta2) of the mean over ranks and elements of g_i^2; it
    costs one number per tensor and step.  The shape u is the moving average of g^2 / (that mean)
    over the warm-up, in which early steps count no more than late ones, plus ``FLOOR`` times its
    own mean, so that a coordinate that was silent during the warm-up cannot take giant steps later.

    Further differences to 1-bit Adam: bias correction, decoupled weight decay, any compressor,
    ``scaled``, and a scale of signs that is contractive (see :class:`~comm_hooks.Sign`).

    Args:
        params, exchange, lr, betas, eps, weight_decay: see
            :class:`~comm_hooks.optim.exchanging.ExchangingOptimizer`.
        freeze_step: the last step with exact gradients, at least 1: the end of the learning rate's
            warm-up will do.
        scaled: exchange m_i / s.  Better for sparse compressors; not needed for ``Sign``.
        total_steps: the number of steps of the run, if known, which must exceed ``freeze_step``.

    State per parameter: ``exp_avg``, ``exp_avg_sq`` (v, then u), ``power`` (p), and until
    ``freeze_step`` ``shape``.

    Raises:
        ValueError: for a ``freeze_step`` beyond ``total_steps``; for an exchange that would
            compress the numbers p (``min_ndim=1``).

    Example::

        >>> from comm_hooks import ErrorFeedback, Exchange, TopK, skip_hook
        >>> ddp_model.register_comm_hook(None, skip_hook)
        >>> exchange = Exchange(TopK(density=1 / 64, value_bits=1), memory=ErrorFeedback())
        >>> optimizer = CompressedAdam(
        ...     ddp_model.named_parameters(), exchange, lr=1e-3, freeze_step=1000, scaled=True
        ... )
    """

    published = block(compressor="topk", density=1 / 64, value_bits=1, memory="error_feedback")

    def __init__(
        self,
        params: ParamsT,
        exchange: Exchange,
        *,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        freeze_step: int,
        scaled: bool = False,
        total_steps: int | None = None,
    ) -> None:
        require_flag(self, "scaled", scaled)
        super().__init__(
            params,
            exchange,
            {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay},
            freeze_step=freeze_step,
            total_steps=total_steps,
            scaled=scaled,
        )
        if not exchange.settings.exempts((len(self._parameters()),)):
            raise ValueError(
                "CompressedAdam sends a vector with one number per parameter, which its exchange "
                "must not compress: leave min_ndim at 2"
            )
        self.scaled = scaled

    def _step(self, gradients: Tensors) -> None:
        states = self._states("exp_avg", "exp_avg_sq", "shape")
        t = int(states[0]["step"]) + 1
        is_warm_up = self._is_exact(states)
        momenta = gradients if is_warm_up else self._own_momenta(gradients, states)
        # One number per parameter, which is 1-D and therefore travels exactly, in the same payload.
        norms = torch._foreach_norm(gradients)
        torch._foreach_div_(norms, [max(1, g.numel()) ** 0.5 for g in gradients])
        powers = torch.stack(norms).square_()
        if self._average({**self._named(momenta), POWERS: powers}, compress=not is_warm_up):
            for own, group in self._groups():
                self._update_moments(momenta[own], powers[own], states[own], group, is_warm_up)
            count_step(states)
            for own, group in self._groups():
                self._update_parameters(group, states[own], t)
            if t == self.freeze_step:
                self._freeze()

    def _own_momenta(self, gradients: Tensors, states: States) -> Tensors:
        """Return this rank's momenta m_i, divided by s if ``scaled`` (steps 1 and 2)."""
        new = list(gradients)
        self._set_momenta(new, states)
        if self.scaled:
            for own, group in self._groups():
                torch._foreach_div_(new[own], _scales(states[own], group))
        return new

    def _update_moments(
        self, new: Tensors, powers: torch.Tensor, states: States, group: Group, is_warm_up: bool
    ) -> None:
        beta1, beta2 = group["betas"]
        power = list(powers.unbind())
        m = values(states, "exp_avg")
        if is_warm_up:
            average_(m, new, beta1)
            squares = list(torch._foreach_mul(new, new))
            average_(values(states, "exp_avg_sq"), squares, beta2)
            # Where there is no gradient both are zero.
            torch._foreach_div_(squares, torch._foreach_clamp_min(power, 1e-38))
            average_(values(states, "shape"), squares, beta2)
        else:
            if self.scaled:
                torch._foreach_mul_(new, _scales(states, group))
            torch._foreach_copy_(m, new)
        average_(zeros(states, "power", power), power, beta2)

    def _freeze(self) -> None:
        """Replace v in ``exp_avg_sq`` by its frozen shape u, once, after ``freeze_step`` steps."""
        for group, parameter in ((g, p) for g in self.param_groups for p in held(g)):
            state = self.state[parameter]
            shape = state.pop("shape")
            # A parameter that had no gradient so far is as good as flat.
            shape = torch.where(shape.any(), shape, torch.ones_like(shape))
            corrected = 1 - group["betas"][1] ** self.freeze_step
            state["exp_avg_sq"] = (shape + FLOOR * shape.mean()) / corrected

    def _update_parameters(self, group: Group, states: States, t: int) -> None:
        m, u = values(states, "exp_avg"), values(states, "exp_avg_sq")
        if t <= self.freeze_step:
            adamw_(held(group), m, u, group, t)
            return
        beta1, beta2 = group["betas"]
        power = torch.stack(values(states, "power")) / (1 - beta2**t)
        divisors = torch._foreach_sqrt(u)
        torch._foreach_mul_(divisors, list(power.sqrt_().unbind()))
        torch._foreach_add_(divisors, group["eps"])
        directions = list(torch._foreach_div(m, divisors))
        descend_(held(group), directions, group, 1 - beta1**t)


def _scales(states: States, group: Group) -> Tensors:
    """Return sqrt(``exp_avg_sq``) + eps, by which momenta are divided before the exchange."""
    return roots(values(states, "exp_avg_sq"), group["eps"])
