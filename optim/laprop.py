"""Adam that divides each gradient by its root mean square before it averages over steps."""

from collections.abc import Mapping
from typing import Any

import torch
from torch.optim.optimizer import ParamsT

from comm_hooks.optim.base import BatchedOptimizer, Group, Tensors, state_dtype
from comm_hooks.optim.hyperparameters import check_hyperparameters
from comm_hooks.optim.moments import (
    along_,
    count_step,
    normalized_average_,
    prepared,
    shortened,
    values,
)
from comm_hooks.requirements import require_within


class LaProp(BatchedOptimizer):
    r"""Adam with its two operations in the other order: normalize gradients, then average them.

    With g the gradient and m = v = 0 at first:

    1. v = beta2 v + (1 - beta2) g^2,  v-hat = v / (1 - beta2^t);
    2. m = beta1 m + (1 - beta1) g / (sqrt(v-hat) + eps);
    3. theta = theta - lr (m / (1 - beta1^t) + weight_decay theta).

    Adam averages gradients and divides by the *present* v; here every gradient is divided by the v
    of its own step, and no element of a step is longer than lr / sqrt(1 - beta2).  Local steps need
    that more than steps along averaged gradients: their batches are smaller and noisier.

    Source: Ziyin, Wang & Ueda, "LaProp: Separating Momentum and Adaptivity in Adam", 2020,
    Algorithm 1, with decoupled weight decay.

    Args:
        params: parameters, named or not, or groups; a group may have its own value of any argument.
        lr: learning rate; schedulers may change it.
        betas: decay rates of the first and the second moment, each in [0, 1).
        eps: added to the denominator.
        weight_decay: decoupled weight decay, as in AdamW.
        horizon: a factor of the horizon of beta1, 1 / (1 - beta1), in (0, 1]: so that groups keep
            the betas of the AdamW that is replaced.

    State per parameter: ``step``, a float32 number on the CPU, ``exp_avg_normalized`` (m) and
    ``exp_avg_sq`` (v) in float32.  The state of an AdamW can be loaded: its m is divided by the
    present sqrt(v-hat) + eps.  An AdamW with LaProp's state raises ``KeyError: 'exp_avg'``.

    Raises:
        ValueError: for hyperparameters out of range.

    Not supported: sparse and complex gradients, a learning rate that is a tensor, ``capturable``.

    Example::

        >>> from comm_hooks.optim import LaProp
        >>> optimizer = LaProp(model.named_parameters(), lr=1e-3)
        >>> model(torch.ones(1, 8)).square().sum().backward()
        >>> optimizer.step()
    """

    def __init__(
        self,
        params: ParamsT,
        lr: float = 1e-3,
        *,
        betas: tuple[float, float] = (0.9, 0.95),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        horizon: float = 1.0,
    ) -> None:
        defaults = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay}
        super().__init__(params, {**defaults, "horizon": horizon})

    def _check_group(self, settings: Group) -> None:
        others = dict(settings)
        require_within(self, "horizon", others.pop("horizon"), "(0, 1]")
        check_hyperparameters(self, **others)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore the result of ``state_dict()``, or take over that of an AdamW."""
        if not any("horizon" in group for group in state_dict["param_groups"]):
            state_dict = {**state_dict, "state": self._normalized(state_dict)}
        super().load_state_dict(state_dict)

    def _normalized(self, of_adamw: Mapping[str, Any]) -> dict[Any, Any]:
        """Return AdamW's state with each first moment divided by the root of the second one."""
        result = dict(of_adamw["state"])
        for saved, own in zip(of_adamw["param_groups"], self.param_groups, strict=False):
            (beta1, beta2), eps = saved["betas"], saved["eps"]
            for key in saved["params"]:
                state = dict(result.get(key, {}))
                if not (t := float(state.get("step", 0))):
                    continue
                mean = state.pop("exp_avg")
                mean = mean.to(state_dtype(mean.dtype)) / (1 - beta1**t)
                mean /= (state["exp_avg_sq"] / (1 - beta2**t)).sqrt() + eps
                beta1_here = shortened(beta1, own["horizon"])
                mean *= 1 - beta1_here**t
                result[key] = {**state, "step": torch.tensor(t), "exp_avg_normalized": mean}
        return result

    def _update(self, parameters: Tensors, group: Group) -> None:
        beta1, beta2 = group["betas"]
        group = {**group, "betas": (shortened(beta1, group["horizon"]), beta2)}
        by_age: dict[int, Tensors] = {}
        for parameter in parameters:
            by_age.setdefault(self._age(parameter), []).append(parameter)
        for steps, members in by_age.items():
            states = [self.state[p] for p in members]
            count_step(states)
            momenta = values(states, "exp_avg_normalized")
            gradients = [p.grad for p in members if p.grad is not None]
            normalized_average_(momenta, gradients, values(states, "exp_avg_sq"), group, steps + 1)
            along_(members, momenta, group, 1 - group["betas"][0] ** (steps + 1))

    def _age(self, parameter: torch.Tensor) -> int:
        """Return the number of steps that a parameter has taken; make its state if missing."""
        state, dtype = self.state[parameter], state_dtype(parameter.dtype)
        prepared([state], [parameter], dtype, "exp_avg_normalized", "exp_avg_sq")
        m, v = state["exp_avg_normalized"], state["exp_avg_sq"]
        if v.stride() != m.stride():
            # Loaded from a model that lay in memory in another order; fused kernels do not look.
            state["exp_avg_sq"] = torch.empty_like(m).copy_(v)
        return int(state["step"])
