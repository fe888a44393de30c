"""1-bit Adam: Adam for ``freeze_step`` steps, then compressed momenta and a frozen variance."""

import torch
from torch.optim.optimizer import ParamsT

from comm_hooks.exchange import Exchange
from comm_hooks.optim.base import Group, Tensors, held
from comm_hooks.optim.moments import averages_, count_step, descend_, values
from comm_hooks.optim.published.freezing import SIGNS, FreezingOptimizer, denominators, directions
from comm_hooks.warnings import warn_program


class OneBitAdam(FreezingOptimizer):
    """1-bit Adam: exact gradients for ``freeze_step`` steps, then momenta of one bit per element.

    Tang et al., "1-bit Adam: Communication Efficient Large-Scale Training with Adam's Convergence
    Speed", ICML 2021, Algorithm 1; the optimizer that DeepSpeed had under the same name.  g_i is
    rank i's gradient; there is no bias correction.

    Steps 1 ... ``freeze_step``:

    1. g = the exact mean of g_i;
    2. m = beta1 m + (1 - beta1) g,  v = beta2 v + (1 - beta2) g^2;
    3. theta = theta - lr (m / (sqrt(v) + eps) + weight_decay theta).

    From then on (the switch is in the base class ``FreezingOptimizer``) v stays the same, and

    1. each rank forms m_i = beta1 m + (1 - beta1) g_i, m being the same on all ranks;
    2. m = the exchange's mean of m_i, error feedback included;
    3. theta = theta - lr (m / (sqrt(v) + eps) + weight_decay theta).

    The exchange that was published is ``Exchange(Sign(block_size=None, scale="rms"),
    ErrorFeedback(), collective="sharded")``: every rank sends signs and one scale per tensor,
    averages the signs it gets for its shard, and sends the signs and one scale of that mean, with
    error feedback in both directions.  Any other exchange works, too.  With ``Sign()``, a scale per
    block, tensors with parts of different magnitude need other learning rates.

    The price is in the word frozen: v belongs to the first steps, with gradients that are larger
    and scaled otherwise than later ones, so the longer the run, the further it falls behind Adam.
    :class:`~comm_hooks.optim.LocalVarianceAdam` freezes nothing.  Use OneBitAdam to compare with
    published results or to go on from DeepSpeed.

    Differences to the published code (DeepSpeed): residuals are saved and restored.  The padding of
    a tensor takes no part in a rank's message; in the scale of the last shard it counts, as there,
    but there is at most an element less than there are ranks.  Parameters with at most one
    dimension or fewer than the exchange's ``min_numel`` elements are exempt: they travel exactly,
    in the same payload.  Where v is still zero at
    ``freeze_step``, no gradient was seen in all of the warm-up and m / (0 + eps) would be a giant
    step: such coordinates are only decayed.  (DeepSpeed's remedy is a mask that the user provides.)

    Args:
        params, exchange, lr, betas, eps, weight_decay: see
            :class:`~comm_hooks.optim.exchanging.ExchangingOptimizer`.
        freeze_step: the last step with exact gradients, at least 1.  The authors advise 15 to 25 %
            of all steps.
        total_steps: the number of steps of the run, if known, which must exceed ``freeze_step``.

    State per parameter: ``exp_avg``, ``exp_avg_sq``.  The state of DeepSpeed's own (0.19.6
    and older) can be loaded: moments and steps go on.  It has the errors of rank 0 alone, which
    DeepSpeed does not load either: they start from zero, with a warning.

    Raises:
        ValueError: for a ``freeze_step`` beyond ``total_steps``.

    Example::

        >>> from comm_hooks import ErrorFeedback, Exchange, Sign, skip_hook
        >>> from comm_hooks.optim.published.one_bit_adam import OneBitAdam
        >>> ddp_model.register_comm_hook(None, skip_hook)
        >>> sign = Sign(block_size=None, scale="rms")
        >>> exchange = Exchange(sign, memory=ErrorFeedback(), collective="sharded")
        >>> optimizer = OneBitAdam(
        ...     ddp_model.named_parameters(), exchange, lr=1e-3, freeze_step=200, total_steps=1000
        ... )
    """

    published = SIGNS

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
        total_steps: int | None = None,
    ) -> None:
        super().__init__(
            params,
            exchange,
            {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay},
            freeze_step=freeze_step,
            total_steps=total_steps,
        )

    def load_state_dict(self, state_dict: Group) -> None:
        saved = state_dict["state"]
        if any("corrected_tensor_size" in state for state in saved.values()):
            warn_program(
                "OneBitAdam: the state was saved by DeepSpeed's own: moments and steps go on, "
                "compression errors, which it saves of rank 0 alone, start from zero"
            )
            kept = {
                key: {
                    "step": torch.tensor(float(state["step"])),
                    "exp_avg": state["exp_avg"],
                    "exp_avg_sq": state["exp_avg_sq"],
                }
                for key, state in saved.items()
            }
            state_dict = {**state_dict, "state": kept}
        super().load_state_dict(state_dict)

    def _step(self, gradients: Tensors) -> None:
        states = self._states("exp_avg", "exp_avg_sq")
        is_exact = self._is_exact(states)
        if not is_exact:
            self._set_momenta(gradients, states)
        if not self._average(self._named(gradients), compress=not is_exact, is_raw=is_exact):
            return
        for own, group in self._groups():
            m, v = values(states[own], "exp_avg"), values(states[own], "exp_avg_sq")
            if is_exact:
                averages_(states[own], gradients[own], group["betas"])
            else:
                torch._foreach_copy_(m, gradients[own])
            descend_(held(group), directions(m, v, denominators(v, group)), group)
        count_step(states)
