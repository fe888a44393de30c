"""1-bit Adam: Adam for a while, then compressed momenta over a frozen second moment."""

from typing import Any

import torch
from torch.optim.optimizer import ParamsT

from comm_hooks.exchange import Exchange
from comm_hooks.optim.exchanging import ExchangingOptimizer
from comm_hooks.optim.hyperparameters import check_freeze_step, check_hyperparameters

# Far below the root of the smallest float32, so that it changes no denominator but zero.
TINY = 1e-30


class OneBitAdam(ExchangingOptimizer):
    """1-bit Adam: exact gradients for ``freeze_step`` steps, then momenta of one bit an element.

    Tang et al., "1-bit Adam: Communication Efficient Large-Scale Training with Adam's Convergence
    Speed", ICML 2021, Algorithm 1; the optimizer that DeepSpeed had under the same name.  g_i is
    rank i's gradient; there is no bias correction.

    Steps 1 ... ``freeze_step``:

    1. g = the exact mean of g_i;
    2. m = beta1 m + (1 - beta1) g,  v = beta2 v + (1 - beta2) g^2;
    3. theta = theta - lr (m / (sqrt(v) + eps) + weight_decay theta).

    From then on v stays as it is, and

    1. each rank forms m_i = beta1 m + (1 - beta1) g_i, m being the same on all ranks;
    2. m = the exchange's mean of m_i, error feedback included;
    3. theta = theta - lr (m / (sqrt(v) + eps) + weight_decay theta).

    The exchange that was published is ``Exchange(Sign(block_size=None, scale="rms"),
    ErrorFeedback(), collective="sharded")``: every rank sends signs and one scale per tensor,
    averages the signs it gets for its shard and sends the signs and one scale of that, with error
    feedback on both ways.  Any other exchange will do, too.  With a scale per block, ``Sign()``,
    parameters whose parts differ in magnitude move otherwise: learning rates do not carry over.

    The price is in the word frozen: v belongs to the first steps, whose gradients are larger and
    scaled otherwise than later ones, so the longer the run, the further it falls behind Adam.
    :class:`~comm_hooks.optim.CompressedAdam` is the same scheme without this: it freezes the shape
    of v but keeps its scale alive, corrects the bias and can let coordinates compete in the units
    of the step (``scaled``).  Use OneBitAdam to compare with what is published or to go on from
    DeepSpeed.

    Differences to the published code (DeepSpeed): residuals are saved and restored.  What pads a
    tensor takes no part in what a rank sends; in the scale of the last shard it counts, as there,
    but there is at most an element less than there are ranks.  Parameters with at most one
    dimension or fewer than the exchange's ``min_numel`` elements are exempt: they travel exactly,
    in the same payload.  Where v is still zero at
    ``freeze_step``, no gradient was seen in all of the warm-up and m / (0 + eps) would be a giant
    step: such coordinates are only decayed.  (DeepSpeed's remedy is a mask that the user provides.)

    The optimizer owns the exchange: DDP must not average, so register
    :func:`~comm_hooks.skip_hook`.  If any rank's gradient is not finite, all ranks skip the step,
    also under a ``GradScaler``.

    Args:
        params: parameters, or better ``model.named_parameters()``: saved residuals are then tied to
            names.  Parameter groups are supported.
        exchange: how momenta are averaged.
        lr: learning rate.
        betas: decay of the first and the second moment.
        eps: added to the denominator.
        weight_decay: decoupled (AdamW).
        freeze_step: the last step with exact gradients, at least 1.  The authors advise 15 to 25 %
            of all steps.
        total_steps: the length of the run, if known: a ``freeze_step`` beyond it is refused.

    State per parameter: ``step``, ``exp_avg``, ``exp_avg_sq``, float32 and equal on all ranks.  The
    residuals are the exchange's and differ between ranks: save ``exchange.state_dict()`` on every
    rank beside the optimizer's.

    Cost: one exchange per step (two collectives if sharded), and one number read back from the
    device, which tells whether the step is taken.

    Raises:
        ValueError: for hyperparameters out of range; for a ``freeze_step`` beyond ``total_steps``.

    Not supported: sparse gradients, parameters on several devices, ``capturable``.

    Example::

        >>> from comm_hooks import ErrorFeedback, Exchange, Sign, skip_hook
        >>> from comm_hooks.optim.one_bit_adam import OneBitAdam
        >>> ddp_model.register_comm_hook(None, skip_hook)
        >>> sign = Sign(block_size=None, scale="rms")
        >>> exchange = Exchange(sign, memory=ErrorFeedback(), collective="sharded")
        >>> optimizer = OneBitAdam(
        ...     ddp_model.named_parameters(), exchange, lr=1e-3, freeze_step=200, total_steps=1000
        ... )
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
        freeze_step: int,
        total_steps: int | None = None,
    ) -> None:
        check_hyperparameters(self, betas=betas, lr=lr, eps=eps, weight_decay=weight_decay)
        check_freeze_step(self, freeze_step, total_steps)
        super().__init__(
            params,
            {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay},
            exchange,
            {"freeze_step": freeze_step},
        )
        self.freeze_step = freeze_step

    def _step(self, gradients: list[torch.Tensor]) -> None:
        states = self._states("exp_avg", "exp_avg_sq")
        is_warm_up = int(states[0]["step"]) < self.freeze_step
        if not is_warm_up:
            for own, group in self._groups():
                gradients[own] = momenta(gradients[own], states[own], group)
        if not self._average(self._named(gradients), compress=not is_warm_up):
            return
        for own, group in self._groups():
            parameters, members, mean = group["params"], states[own], gradients[own]
            m, v = [s["exp_avg"] for s in members], [s["exp_avg_sq"] for s in members]
            if is_warm_up:
                torch._foreach_lerp_(m, mean, 1 - group["betas"][0])
                update_variance_(v, mean, group)
            else:
                torch._foreach_copy_(m, mean)
            torch._foreach_mul_(parameters, 1 - group["lr"] * group["weight_decay"])
            torch._foreach_add_(parameters, directions(m, v, group), alpha=-group["lr"])
            torch._foreach_add_([s["step"] for s in members], 1)


def momenta(
    gradients: list[torch.Tensor],
    states: list[dict[str, torch.Tensor]],
    group: dict[str, Any],
) -> list[torch.Tensor]:
    """Return the momenta that follow from this rank's gradients; the state stays."""
    m = [s["exp_avg"] for s in states]
    return list(torch._foreach_lerp(m, gradients, 1 - group["betas"][0]))


def update_variance_(
    v: list[torch.Tensor], mean: list[torch.Tensor], group: dict[str, Any]
) -> None:
    """Let the second moment see the exact mean of the gradients."""
    beta2 = group["betas"][1]
    torch._foreach_mul_(v, beta2)
    torch._foreach_addcmul_(v, mean, mean, value=1 - beta2)


def directions(
    m: list[torch.Tensor], v: list[torch.Tensor], group: dict[str, Any]
) -> list[torch.Tensor]:
    """Return m / (sqrt(v) + eps), and 0 where v is 0: signs have no zero, so m need not be."""
    result = torch._foreach_sign(v)
    torch._foreach_mul_(result, m)
    roots = torch._foreach_sqrt(v)
    torch._foreach_add_(roots, max(group["eps"], TINY))
    torch._foreach_div_(result, roots)
    return list(result)
