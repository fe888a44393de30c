"""0/1 Adam: a second moment that is updated ever more rarely, and steps without communication."""

from collections.abc import Sequence
from typing import Any

import torch
from torch.optim.optimizer import ParamsT

from comm_hooks.exchange import Exchange
from comm_hooks.kernels.magnitudes import magnitudes
from comm_hooks.optim.base import Group, States, Tensors, held
from comm_hooks.optim.exchanging import ExchangingOptimizer
from comm_hooks.optim.moments import average_squares_, count_step, decay_, values
from comm_hooks.optim.published.freezing import SIGNS, denominators, directions, momenta
from comm_hooks.requirements import require_positive


class ZeroOneAdam(ExchangingOptimizer):
    """0/1 Adam: one bit per element at some steps, no communication at the others.

    Lu, Li, Zhang, De Sa & He, "Maximizing Communication Efficiency for Large-scale Training via 0/1
    Adam", ICLR 2023, Algorithm 1; the optimizer that DeepSpeed had under the same name.  g_i is
    rank i's gradient; all steps but those of the third kind leave replicas synchronized; there is
    no bias correction.

    Variance steps, while t <= ``var_freeze_step``; their distance is 1 at first and doubles after
    every ``var_update_scaler`` of them:

    1. g = the exact mean of g_i;
    2. m = beta1 m + (1 - beta1) g,  v = beta2 v + (1 - beta2) g^2;
    3. x = (1 - lr weight_decay) x - lr m / (sqrt(v) + eps).

    Synchronization steps; all other steps up to ``var_freeze_step``, then one per interval, which
    is 1 at first and doubles every ``local_step_scaler`` steps up to ``local_step_clipper``.
    Unless there were local steps before, s = u_i = 0 and x_s = x:

    1. m_i = beta1 m_i + (1 - beta1) g_i,  u_i = u_i + lr m_i,  s = s + lr;
    2. m = the exchange's mean of u_i / s, error feedback included;
    3. x_s = (1 - lr weight_decay) x_s,  x = x_s - s m / (sqrt(v) + eps);
    4. all ranks go on with m_i = m, u_i = 0, s = 0, x_s = x.

    Local steps, the remaining ones, without communication:

    1. m_i, u_i and s as above;
    2. x_s = (1 - lr weight_decay) x_s,  x_i = x_s - u_i / (sqrt(v) + eps).

    Differences to the paper's listing:

    * v is updated before the step, not after it (as DeepSpeed does): v starts at zero.
    * At a variance step momenta are averaged through the gradients, exactly and in one exchange;
      residuals wait.  (DeepSpeed's code compresses gradients, not momenta, up to
      ``var_freeze_step``, and drops the residuals there.)
    * The message is u_i / s, the mean momentum, not u_i.  Residuals are then in units of the
      momentum: divided by an s that a schedule has brought near zero, a residual in units of lr m
      would make a giant momentum.  As long as s stays the same the two are equal.
    * x starts anew from x_s, the same bits on all ranks, instead of adding and subtracting u_i.
    * Weight decay is decoupled; within a round of local steps it acts on x_s.
    * Where v is zero no step is taken, see :class:`~comm_hooks.optim.OneBitAdam`, also for which
      parameters are exempt from compression and the price of a frozen v.

    DeepSpeed's exchange is ``Exchange(Sign(block_size=None, scale="rms"), ErrorFeedback(),
    collective="sharded")``, see :class:`~comm_hooks.optim.OneBitAdam`.

    **Between synchronizations replicas differ**, in x as well as in the optimizer's state.  Look at
    :attr:`is_synchronized` before evaluating or saving, or call :meth:`synchronize`, on all ranks.
    A state that is saved in between must be saved, and loaded, by every rank for itself, the
    model's like the optimizer's and the exchange's.

    **Gradients that are not finite.**  At a step that communicates all ranks skip it, and the
    next one tries again.  At a local step the other ranks cannot know: that rank's gradient counts
    as zero, its momentum carries it on, and the schedule stays that of the others.  Under a
    ``GradScaler`` that holds, too; scales may then differ between ranks, which does no harm, since
    every rank unscales its own gradients first.

    All ranks must call :meth:`synchronize` between the same steps.  Where one does so alone, all
    of them raise ``PayloadError`` at the exchange.

    Args:
        params, exchange, lr, betas, eps, weight_decay: see
            :class:`~comm_hooks.optim.exchanging.ExchangingOptimizer`; lr may change at any step.
        var_freeze_step: the last step at which v may be updated, at least 1; the authors take the
            end of the learning rate's warm-up.  Local steps begin after it.
        var_update_scaler: kappa, the number of variance steps until their distance doubles.
        local_step_scaler: the number of steps until the interval doubles; the authors take the
            number in which the learning rate halves.
        local_step_clipper: H, the longest interval; with 1 there are no local steps.

    State per parameter: ``exp_avg`` and ``exp_avg_sq``, equal on all ranks while synchronized;
    between synchronizations also ``mean_exp_avg`` (u_i / s), float32, and ``anchor`` (x_s).  Per
    group ``steps_since_sync`` and ``lr_since_sync`` (s).

    Not supported: writing to parameters between synchronizations, which drop such a change.

    Example::

        >>> from comm_hooks import ErrorFeedback, Exchange, Sign, skip_hook
        >>> from comm_hooks.optim.published.zero_one_adam import ZeroOneAdam
        >>> ddp_model.register_comm_hook(None, skip_hook)
        >>> sign = Sign(block_size=None, scale="rms")
        >>> exchange = Exchange(sign, memory=ErrorFeedback(), collective="sharded")
        >>> optimizer = ZeroOneAdam(
        ...     ddp_model.named_parameters(), exchange, lr=1e-3,
        ...     var_freeze_step=200, local_step_scaler=500,
        ... )
    """

    _grows = False

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
        var_freeze_step: int,
        var_update_scaler: int = 16,
        local_step_scaler: int = 32678,
        local_step_clipper: int = 16,
    ) -> None:
        schedule = {
            "var_freeze_step": var_freeze_step,
            "var_update_scaler": var_update_scaler,
            "local_step_scaler": local_step_scaler,
            "local_step_clipper": local_step_clipper,
        }
        for name, value in schedule.items():
            require_positive(self, name, value)
        super().__init__(
            params,
            exchange,
            {
                "lr": lr,
                "betas": betas,
                "eps": eps,
                "weight_decay": weight_decay,
                "steps_since_sync": 0,
                "lr_since_sync": 0.0,
            },
            **schedule,
        )
        self.var_freeze_step = var_freeze_step
        self.var_update_scaler = var_update_scaler
        self.local_step_scaler = local_step_scaler
        self.local_step_clipper = local_step_clipper
        self._is_off_schedule = False

    @property
    def is_synchronized(self) -> bool:
        """Whether parameters and state are the same on all ranks."""
        return not any("anchor" in state for state in self.state.values())

    def hyperparameters(self) -> dict[str, Any]:
        """Return the settings of the next exchange, and whether :meth:`synchronize` starts it."""
        return {**super().hyperparameters(), "off schedule": self._is_off_schedule}

    def replica(self) -> Sequence[torch.Tensor]:
        """Return x_s, the parameters at the last synchronization, the same on all ranks."""
        return [self.state[p].get("anchor", p) for p in self._parameters()]

    def is_variance_step(self, t: int) -> bool:
        """Return whether step t = 1, 2, ... updates the second moment."""
        if t > self.var_freeze_step:
            return False
        # Phase p has var_update_scaler variance steps, 2^p apart.
        phase = (t // self.var_update_scaler + 1).bit_length() - 1
        before = self.var_update_scaler * (2**phase - 1)
        return (t - before) % 2**phase == 0

    def synchronization_interval(self, t: int) -> int:
        """Return the number of steps between two synchronizations at step t = 1, 2, ...."""
        if t <= self.var_freeze_step:
            return 1
        doublings = (t - self.var_freeze_step - 1) // self.local_step_scaler
        # Powers beyond the clipped interval are not needed.
        return min(
            2 ** min(doublings, self.local_step_clipper.bit_length()), self.local_step_clipper
        )

    @torch.no_grad()
    def synchronize(self) -> None:
        """End the local steps now, outside of the schedule: exchange mean momenta on all ranks."""
        if self.is_synchronized:
            return
        states = self._states("exp_avg", "exp_avg_sq")
        means = [s["mean_exp_avg"].clone() for s in states]
        self._is_off_schedule = True
        try:
            is_finite = self._average(self._named(means))
        finally:
            self._is_off_schedule = False
        if is_finite:
            self._agree(means, states)
        self.exchange.compare_replicas()

    def _step(self, gradients: Tensors) -> None:
        states = self._states("exp_avg", "exp_avg_sq")
        t = int(states[0]["step"]) + 1
        # Replicas can differ here if the run goes on with another schedule than it was saved with.
        if self.is_variance_step(t) and self.is_synchronized:
            if not self._average(self._named(gradients), compress=False, is_raw=True):
                return
            for own, group in self._groups():
                v = values(states[own], "exp_avg_sq")
                average_squares_(v, gradients[own], group["betas"][1])
                gradients[own] = momenta(gradients[own], states[own], group)
        elif self.param_groups[0]["steps_since_sync"] + 1 < self.synchronization_interval(t):
            self._local_step(gradients, states)
            return
        else:
            for own, group in self._groups():
                new = momenta(gradients[own], states[own], group)
                gradients[own] = self._mean_momenta(new, states[own], group)
            if not self._average(self._named(gradients)):
                return
        self._advance(states)
        self._agree(gradients, states)

    def _local_step(self, gradients: Tensors, states: States) -> None:
        if not magnitudes([g.flatten() for g in gradients]).isfinite().all():
            torch._foreach_zero_(gradients)
        for own, group in self._groups():
            parameters, members = held(group), states[own]
            new = momenta(gradients[own], members, group)
            means = self._mean_momenta(new, members, group)
            torch._foreach_copy_(values(members, "exp_avg"), new)
            for parameter, state, mean in zip(parameters, members, means, strict=True):
                if "anchor" not in state:
                    state["anchor"] = parameter.detach().clone()
                state["mean_exp_avg"] = mean
        self._advance(states)
        for own, group in self._groups():
            self._move(values(states[own], "mean_exp_avg"), states[own], group)

    def _mean_momenta(self, new: Tensors, states: States, group: Group) -> Tensors:
        """Return u_i / s, the lr-weighted means of momenta since the last synchronization."""
        if "anchor" not in states[0]:
            return new
        total = group["lr_since_sync"] + group["lr"]
        share = group["lr"] / total if total else 1.0
        return list(torch._foreach_lerp(values(states, "mean_exp_avg"), new, share))

    def _advance(self, states: States) -> None:
        """Count the step, add the learning rate to s, and apply the weight decay to x_s."""
        count_step(states)
        for own, group in self._groups():
            origins = [s.get("anchor", p) for s, p in zip(states[own], held(group), strict=True)]
            decay_(origins, group)
            group["steps_since_sync"] += 1
            group["lr_since_sync"] += group["lr"]

    def _agree(self, means: Tensors, states: States) -> None:
        """Take steps 3 and 4 of a synchronization, from the mean momenta over ranks."""
        for own, group in self._groups():
            self._move(means[own], states[own], group)
            torch._foreach_copy_(values(states[own], "exp_avg"), means[own])
            group.update(steps_since_sync=0, lr_since_sync=0.0)
            for state in states[own]:
                state.pop("anchor", None)
                state.pop("mean_exp_avg", None)

    def _move(self, means: Tensors, states: States, group: Group) -> None:
        """Set the parameters to x_s - s mean / (sqrt(v) + eps)."""
        if "anchor" in states[0]:
            torch._foreach_copy_(held(group), values(states, "anchor"))
        v = values(states, "exp_avg_sq")
        steps = directions(means, v, denominators(v, group))
        torch._foreach_add_(held(group), steps, alpha=-group["lr_since_sync"])
