"""1-bit LAMB: LAMB for ``freeze_step`` steps, then compressed momenta and frozen trust ratios."""

from collections.abc import Sequence

import torch
from torch.optim.optimizer import ParamsT

from comm_hooks.exchange import Exchange
from comm_hooks.optim.base import Group, States, Tensors, block, held
from comm_hooks.optim.moments import average_squares_, averages_, count_step, values
from comm_hooks.optim.published.freezing import SIGNS, FreezingOptimizer, denominators, directions
from comm_hooks.requirements import require_within
from comm_hooks.shards import whole


class OneBitLamb(FreezingOptimizer):
    """1-bit LAMB: LAMB on exact gradients for ``freeze_step`` steps, then 1-bit momenta.

    Li et al., "1-bit LAMB: Communication Efficient Large-Scale Large-Batch Training with LAMB's
    Convergence Speed", HiPC 2022, Algorithm 1; the optimizer that DeepSpeed had under the same
    name.  For batches so large that layers need learning rates of their own.  g_i is rank i's
    gradient; there is no bias correction; a parameter is a layer.

    Steps 1 ... ``freeze_step``:

    1. g = the exact mean of g_i;
    2. m = beta1 m + (1 - beta1) g,  v = beta2 v + (1 - beta2) g^2;
    3. u = m / (sqrt(v) + eps) + weight_decay theta;
    4. c = norm(theta) / norm(u), within ``min_coeff`` and ``max_coeff``; 1 if either is 0;
    5. theta = theta - lr c u,  c_avg = coeff_beta c_avg + (1 - coeff_beta) c.

    From then on v and c_avg stay as they are.  With f = v at first, and the number
    s = (mean over layers of rms(m)) / rms(m), which gives all layers' momenta one magnitude,

    1. each rank forms m_i = beta1 m + (1 - beta1) g_i, m being the same on all ranks;
    2. m' = the exchange's mean of s m_i, error feedback included, divided by s;
    3. the gradient that must have been: g = (m' - beta1 m) / (1 - beta1);  m = m';
    4. f = beta2 f + (1 - beta2) g^2, a second moment that is not frozen;
    5. u = m / (sqrt(v) + eps) + weight_decay theta;
    6. r = max (sqrt(v) + eps) / (sqrt(f) + eps); with weight decay w r + 1 - w, where
       w = min(1, norm(m / (sqrt(v) + eps)) / norm(u));
    7. r is kept within ``factor_min`` and ``factor_max``, and then within a share
       ``factor_threshold`` of the last step's;
    8. theta = theta - lr c_avg r u.

    The exchange that was published compresses all momenta as one vector:
    ``Exchange(Sign(block_size=None, scale="rms"), ErrorFeedback(), collective="sharded",
    granularity="bucket")``; s is for that.  Any other exchange will do, too.

    A frozen v has the price that :class:`~comm_hooks.optim.OneBitAdam` describes.  c_avg starts
    from 0: with ``freeze_step`` below 1 / (1 - ``coeff_beta``) it is too small, and so are all
    later steps.

    Differences to the published code (DeepSpeed): those of OneBitAdam, residuals and exempt
    parameters included; there is no first step that changes nothing; s is 1 where m is 0.

    Args:
        params, exchange, lr, betas, eps, weight_decay: see
            :class:`~comm_hooks.optim.exchanging.ExchangingOptimizer`.
        freeze_step: the last step with exact gradients, at least 1.
        total_steps: the number of steps of the run, if known, which must exceed ``freeze_step``.
        max_coeff, min_coeff: the bounds of c.
        coeff_beta: the decay rate of the average of c, in [0, 1).
        factor_max, factor_min: the bounds of r.
        factor_threshold: the largest relative change of r in a step.

    State per parameter: ``exp_avg`` (m), ``exp_avg_sq`` (v), ``exp_avg_sq_fresh`` (f), of its
    shape; ``lamb_coeff`` (c_avg), ``last_factor`` (r), ``scaling_coeff`` (s), scalars.

    Cost: in addition to the base class three norms and a maximum per parameter; nothing more is
    read back from the device.

    Raises:
        ValueError: for numbers out of range, a ``freeze_step`` beyond ``total_steps``, and
            sharded parameters (FSDP2): a layer's norm is of all of it.

    Example::

        >>> from comm_hooks import ErrorFeedback, Exchange, Sign, skip_hook
        >>> from comm_hooks.optim import OneBitLamb
        >>> ddp_model.register_comm_hook(None, skip_hook)
        >>> sign = Sign(block_size=None, scale="rms")
        >>> exchange = Exchange(sign, ErrorFeedback(), "sharded", granularity="bucket")
        >>> optimizer = OneBitLamb(
        ...     ddp_model.named_parameters(), exchange, lr=1e-3, freeze_step=200, total_steps=1000
        ... )
    """

    published = block(**SIGNS, granularity="bucket")

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
        max_coeff: float = 10.0,
        min_coeff: float = 0.01,
        coeff_beta: float = 0.9,
        factor_max: float = 4.0,
        factor_min: float = 0.5,
        factor_threshold: float = 0.1,
    ) -> None:
        require_within(self, "max_coeff", max_coeff, "(0, inf)")
        require_within(self, "min_coeff", min_coeff, f"[0, {max_coeff}]")
        require_within(self, "coeff_beta", coeff_beta, "[0, 1)")
        require_within(self, "factor_max", factor_max, "[1, inf)")
        require_within(self, "factor_min", factor_min, "[0, 1]")
        require_within(self, "factor_threshold", factor_threshold, "[0, 1]")
        settings = {
            "max_coeff": max_coeff,
            "min_coeff": min_coeff,
            "coeff_beta": coeff_beta,
            "factor_max": factor_max,
            "factor_min": factor_min,
            "factor_threshold": factor_threshold,
        }
        defaults = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay}
        super().__init__(
            params, exchange, defaults, freeze_step=freeze_step, total_steps=total_steps, **settings
        )
        if any(whole(p) is not p for p in self._parameters()):
            raise ValueError(
                "OneBitLamb needs the norms of whole parameters, and the model is sharded: use "
                "LocalVarianceAdam"
            )
        self.coeff_bounds = min_coeff, max_coeff
        self.coeff_beta = coeff_beta
        self.factor_bounds = factor_min, factor_max
        self.factor_threshold = factor_threshold

    def _step(self, gradients: Tensors) -> None:
        states = self._states("exp_avg", "exp_avg_sq")
        step = self._exact_step if self._is_exact(states) else self._compressed_step
        if step(gradients, states):
            count_step(states)

    def _exact_step(self, gradients: Tensors, states: States) -> bool:
        if not self._average(self._named(gradients), compress=False, is_raw=True):
            return False
        for own, group in self._groups():
            parameters, members = held(group), states[own]
            m, v = averages_(members, gradients[own], group["betas"])
            updates = directions(m, v, denominators(v, group))
            if group["weight_decay"]:
                torch._foreach_add_(updates, parameters, alpha=group["weight_decay"])
            sizes, lengths = norms(parameters), norms(updates)
            ratios = (sizes / lengths).clamp_(*self.coeff_bounds)
            ratios = torch.where((sizes == 0) | (lengths == 0), 1.0, ratios)
            averages = torch.stack([s.get("lamb_coeff", ratios.new_zeros(())) for s in members])
            # As published: layers without a norm have a ratio of 1.
            kept = torch.where(ratios == 1, averages, averages.lerp(ratios, 1 - self.coeff_beta))
            _keep(members, "lamb_coeff", kept)
            _move_(parameters, updates, ratios, group)
        return True

    def _compressed_step(self, gradients: Tensors, states: States) -> bool:
        is_first = "scaling_coeff" not in states[0]
        scales = _scales(states) if is_first else torch.stack(values(states, "scaling_coeff"))
        self._set_momenta(gradients, states)
        torch._foreach_mul_(gradients, list(scales.unbind()))
        if not self._average(self._named(gradients)):
            return False
        torch._foreach_div_(gradients, list(scales.unbind()))
        if is_first:
            _keep(states, "scaling_coeff", scales)
            _keep(states, "last_factor", torch.ones_like(scales))
            for state in states:
                state["exp_avg_sq_fresh"] = state["exp_avg_sq"].clone()
        for own, group in self._groups():
            parameters, members = held(group), states[own]
            fresh = self._recover(gradients[own], members, group)
            v = values(members, "exp_avg_sq")
            frozen = denominators(v, group)
            updates = directions(gradients[own], v, frozen)
            torch._foreach_div_(frozen, denominators(fresh, group))
            factors = torch.stack(torch._foreach_max(frozen))
            if group["weight_decay"]:
                lengths = norms(updates)
                torch._foreach_add_(updates, parameters, alpha=group["weight_decay"])
                shares = (lengths / norms(updates)).nan_to_num_(1.0).clamp_(max=1.0)
                factors = factors * shares + (1 - shares)
            last, change = torch.stack(values(members, "last_factor")), self.factor_threshold
            factors = factors.clamp(*self.factor_bounds)
            factors = factors.clamp(last * (1 - change), last * (1 + change))
            _keep(members, "last_factor", factors)
            coefficients = torch.stack(values(members, "lamb_coeff")) * factors
            _move_(parameters, updates, coefficients, group)
        return True

    def _recover(self, mean: Tensors, states: States, group: Group) -> Tensors:
        """Take steps 3 and 4 of the compressed steps: store m', and return the updated f."""
        beta1, beta2 = group["betas"]
        m, fresh = values(states, "exp_avg"), values(states, "exp_avg_sq_fresh")
        # m becomes the gradient, and then the mean.
        torch._foreach_mul_(m, -beta1)
        torch._foreach_add_(m, mean)
        torch._foreach_div_(m, 1 - beta1)
        average_squares_(fresh, m, beta2)
        torch._foreach_copy_(m, mean)
        return fresh


def norms(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return the Euclidean norm of each of the n tensors, (n,) float32."""
    return torch.stack(torch._foreach_norm(list(tensors), dtype=torch.float32))


def _scales(states: States) -> torch.Tensor:
    """Return the mean rms of the n layers' momenta divided by each layer's rms, (n,)."""
    m = values(states, "exp_avg")
    sizes = torch.tensor([t.numel() for t in m], device=m[0].device, dtype=torch.float32)
    magnitudes = norms(m) / sizes.sqrt()
    return torch.where(magnitudes == 0, 1.0, magnitudes.mean() / magnitudes)


def _move_(parameters: Tensors, updates: Tensors, rates: torch.Tensor, group: Group) -> None:
    torch._foreach_mul_(updates, list(rates.unbind()))
    torch._foreach_add_(parameters, updates, alpha=-group["lr"])


def _keep(states: States, key: str, scalars: torch.Tensor) -> None:
    """Store the i-th of ``scalars`` under ``key`` in the i-th state."""
    for state, scalar in zip(states, scalars.clone().unbind(), strict=True):
        state[key] = scalar
