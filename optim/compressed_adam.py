"""1-bit Adam's scheme for any compressor: exchange the momentum, freeze the variance."""

from collections.abc import Callable, Iterable
from typing import Any, Literal, overload

import torch
from torch.optim.optimizer import ParamsT

from comm_hooks.compressors.base import require_choice, require_positive
from comm_hooks.exchange import Exchange

# Travels with the gradients, under a name that no parameter has.
POWERS = "<mean squares of gradients>"
# Of the mean of a parameter's shape.  Without it, coordinates whose gradient happened to be small
# during the warm-up take giant steps later.
FLOOR = 0.1


class CompressedAdam(torch.optim.Optimizer):
    r"""Adam that averages gradients exactly at first, then exchanges a compressed momentum.

    Biased compressors and Adam do not mix when the *gradient* is compressed: the second moment
    turns a coordinate that arrives in rare pulses into tiny steps, and signs erase the magnitudes
    that Adam adapts to.  1-bit Adam (Tang et al., ICML 2021) avoids both: the second moment v is
    taken from exact gradients, then frozen, and only the momentum, which is linear in the
    gradients, goes through the compressor.  Here the compressor is anybody's choice; with
    :class:`~comm_hooks.Sign` and ``variance="frozen"`` this is 1-bit Adam.

    Steps 1 ... ``freeze_step`` are AdamW on the exact mean g of the ranks' gradients g_i.  Then:

    1. each rank forms m_i = beta1 m + (1 - beta1) g_i, m being the same on all ranks;
    2. with ``scaled``, m_i is divided by s = sqrt(u) + eps: coordinates compete by the size of the
       step that they cause, not by the size of their gradient;
    3. m = the exchange's mean of m_i (error feedback included), times s if ``scaled``;
    4. theta = theta - lr (m-hat / (sqrt(v) + eps) + weight_decay theta), m-hat = m / (1 - beta1^t).

    What v is from then on, ``variance`` decides:

    * ``"frozen"``: v = u = the v-hat of step ``freeze_step``, as published.  The first gradients of
      a network are often ten times larger than the later ones; if they are among the
      ``freeze_step`` they dominate v, and steps stay too small for ever.
    * ``"tracked"``: v = u p-hat, a frozen shape times a living scale.  The scale p is, for each
      parameter tensor, the moving average (beta2) of the mean over ranks and elements of g_i^2; it
      costs one number per tensor and step.  The shape u is the moving average of g^2 / (that mean)
      over the warm-up, in which early steps count no more than late ones, plus ``FLOOR`` times its
      own mean, so that a coordinate that was silent during the warm-up cannot take giant steps
      later.

    Further differences to 1-bit Adam: bias correction, decoupled weight decay, any compressor,
    ``scaled``, and a scale of signs that is contractive (see :class:`~comm_hooks.Sign`).

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
        freeze_step: the last step with exact gradients, at least 1.  1-bit Adam's authors advise 15
            to 25 % of all steps; with ``"tracked"`` the end of the learning rate's warm-up will do.
        scaled: exchange m_i / s.  Better for sparse compressors; not needed for ``Sign``.
        variance: ``"tracked"`` or ``"frozen"``.

    State per parameter: ``step``, ``exp_avg``, ``exp_avg_sq`` (v, then u), ``power`` (p), all
    float32 and equal on all ranks, and until ``freeze_step`` ``shape``.  The residual is the
    exchange's and differs between ranks: save ``exchange.state_dict()`` on every rank beside the
    optimizer's.

    Cost: one collective per step, and one number read back from the device, which tells whether
    the step is taken.

    Raises:
        ValueError: for hyperparameters out of range.

    Not supported: sparse gradients, parameters on several devices, ``capturable``.

    Example::

        >>> from comm_hooks import ErrorFeedback, Exchange, TopK, skip_hook
        >>> ddp_model.register_comm_hook(None, skip_hook)
        >>> exchange = Exchange(TopK(density=1 / 64, value_bits=1), memory=ErrorFeedback())
        >>> optimizer = CompressedAdam(
        ...     ddp_model.named_parameters(), exchange, lr=1e-3, freeze_step=1000, scaled=True
        ... )
    """

    # GradScaler then calls step() on every rank, instead of skipping it on those that overflowed
    # while the others wait for them, and passes grad_scale.
    _step_supports_amp_scaling = True

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
        variance: Literal["tracked", "frozen"] = "tracked",
    ) -> None:
        if not isinstance(exchange, Exchange):
            raise ValueError(f"CompressedAdam: exchange must be an Exchange, got {exchange!r}")
        require_positive(self, "freeze_step", freeze_step)
        require_choice(self, "variance", variance, ("tracked", "frozen"))
        for name, value in {"lr": lr, "eps": eps, "weight_decay": weight_decay}.items():
            if not value >= 0:
                raise ValueError(f"CompressedAdam: {name} must not be negative, got {value!r}")
        for beta in betas:
            if not 0 <= beta < 1:
                raise ValueError(f"CompressedAdam: betas must lie in [0, 1), got {betas!r}")
        defaults = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay}
        super().__init__(params, defaults)
        self.exchange = exchange
        self.freeze_step = freeze_step
        self.scaled = scaled
        self.variance = variance
        exchange.owner_settings = {
            "optimizer": type(self).__name__,
            "freeze_step": freeze_step,
            "scaled": scaled,
            "variance": variance,
        }

    @overload
    def step(self, closure: None = None) -> None: ...
    @overload
    def step(self, closure: Callable[[], float]) -> float: ...

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:
        """Take one step on all ranks together.

        Args:
            closure: re-evaluates the model and returns the loss.

        Raises:
            ValueError: for sparse gradients.
            ConfigMismatchError: in the first step, if ranks are configured differently.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()

        parameters = [p for group in self.param_groups for p in group["params"]]
        gradients = [self._gradient(p) for p in parameters]
        grad_scale: torch.Tensor | None = getattr(self, "grad_scale", None)
        if grad_scale is not None:
            torch._foreach_div_(gradients, grad_scale)
        states = [self._state(p) for p in parameters]
        t = int(states[0]["step"]) + 1
        is_warm_up = t <= self.freeze_step
        momenta = gradients if is_warm_up else self._own_momenta(gradients, states)
        # One number per parameter, which is 1-D and therefore travels exactly, in the same payload.
        norms = torch._foreach_norm(gradients)
        torch._foreach_div_(norms, [max(1, g.numel()) ** 0.5 for g in gradients])
        powers = torch.stack(norms).square_()
        self.exchange.average_(
            {**dict(zip(self._names(), momenta, strict=True)), POWERS: powers},
            compress=not is_warm_up,
        )
        # Every element is NaN if any rank's gradient was not finite: all ranks skip alike.
        if torch.isfinite(powers[0]):
            self._update_moments(momenta, powers, states, is_warm_up)
            self._update_parameters()
            if t == self.freeze_step:
                self._freeze()
        return loss

    def _own_momenta(
        self, gradients: list[torch.Tensor], states: list[dict[str, Any]]
    ) -> list[torch.Tensor]:
        """Put this rank's gradients into the shared momenta, and scale them if asked to."""
        momenta: list[torch.Tensor] = []
        for first, last, group in self._groups():
            shared = [s["exp_avg"] for s in states[first:last]]
            own = torch._foreach_lerp(shared, gradients[first:last], 1 - group["betas"][0])
            if self.scaled:
                torch._foreach_div_(own, self._scales(states[first:last], group))
            momenta.extend(own)
        return momenta

    def _update_moments(
        self,
        averaged: list[torch.Tensor],
        powers: torch.Tensor,
        states: list[dict[str, Any]],
        is_warm_up: bool,
    ) -> None:
        for first, last, group in self._groups():
            beta1, beta2 = group["betas"]
            new, own = averaged[first:last], states[first:last]
            power = list(powers[first:last].unbind())
            m = [s["exp_avg"] for s in own]
            if is_warm_up:
                torch._foreach_lerp_(m, new, 1 - beta1)
                squares = torch._foreach_mul(new, new)
                torch._foreach_lerp_([s["exp_avg_sq"] for s in own], squares, 1 - beta2)
                # Where there is no gradient both are zero.
                torch._foreach_div_(squares, torch._foreach_clamp_min(power, 1e-38))
                torch._foreach_lerp_([s["shape"] for s in own], squares, 1 - beta2)
            else:
                if self.scaled:
                    torch._foreach_mul_(new, self._scales(own, group))
                torch._foreach_copy_(m, new)
            torch._foreach_lerp_([s["power"] for s in own], power, 1 - beta2)
            torch._foreach_add_([s["step"] for s in own], 1)

    def _freeze(self) -> None:
        """Turn ``exp_avg_sq`` from v into u; once, so a loop over parameters will do."""
        for group, parameter in ((g, p) for g in self.param_groups for p in g["params"]):
            state = self.state[parameter]
            shape = state.pop("shape")
            if self.variance == "tracked":
                # A parameter that had no gradient so far is as good as flat.
                shape = torch.where(shape.any(), shape, torch.ones_like(shape))
                state["exp_avg_sq"] = shape + FLOOR * shape.mean()
            state["exp_avg_sq"] /= 1 - group["betas"][1] ** self.freeze_step

    def _update_parameters(self) -> None:
        for group in self.param_groups:
            parameters = group["params"]
            states = [self.state[p] for p in parameters]
            t = int(states[0]["step"])
            beta1, beta2 = group["betas"]
            roots = torch._foreach_sqrt([s["exp_avg_sq"] for s in states])
            if t <= self.freeze_step:
                torch._foreach_div_(roots, (1 - beta2**t) ** 0.5)
            elif self.variance == "tracked":
                power = torch.stack([s["power"] for s in states]) / (1 - beta2**t)
                torch._foreach_mul_(roots, list(power.sqrt_().unbind()))
            torch._foreach_add_(roots, group["eps"])
            update = torch._foreach_div([s["exp_avg"] for s in states], roots)
            torch._foreach_mul_(parameters, 1 - group["lr"] * group["weight_decay"])
            torch._foreach_add_(parameters, update, alpha=-group["lr"] / (1 - beta1**t))

    def _scales(self, states: list[dict[str, Any]], group: dict[str, Any]) -> list[torch.Tensor]:
        """Return s = sqrt(u) + eps, by which momenta are divided before the exchange."""
        roots = torch._foreach_sqrt([s["exp_avg_sq"] for s in states])
        torch._foreach_add_(roots, group["eps"])
        return list(roots)

    def _groups(self) -> Iterable[tuple[int, int, dict[str, Any]]]:
        """Yield each parameter group with the range of its parameters among all."""
        first = 0
        for group in self.param_groups:
            last = first + len(group["params"])
            yield first, last, group
            first = last

    def _names(self) -> list[str]:
        names = [name for group in self.param_groups for name in group.get("param_names", ())]
        count = sum(len(group["params"]) for group in self.param_groups)
        return names if len(names) == count else [str(index) for index in range(count)]

    def _gradient(self, parameter: torch.Tensor) -> torch.Tensor:
        """Return a float32 copy of a gradient; zeros where there is none on this rank."""
        if parameter.grad is None:
            return torch.zeros_like(parameter, dtype=torch.float32)
        if parameter.grad.is_sparse:
            raise ValueError(
                "CompressedAdam does not support sparse gradients: use sparse=False in embeddings"
            )
        return parameter.grad.to(torch.float32, copy=True)

    def _state(self, parameter: torch.Tensor) -> dict[str, Any]:
        state: dict[str, Any] = self.state[parameter]
        if not state:
            state["step"] = torch.tensor(0.0)
            state["exp_avg"] = torch.zeros_like(parameter, dtype=torch.float32)
            state["exp_avg_sq"] = torch.zeros_like(parameter, dtype=torch.float32)
            state["shape"] = torch.zeros_like(parameter, dtype=torch.float32)
            state["power"] = torch.zeros((), device=parameter.device)
        return state
