"""SGD on noised gradients."""

from typing import Any

import torch
from torch.optim.optimizer import ParamsT

from comm_hooks.optim.batched import BatchedOptimizer, state_dtype, widened
from comm_hooks.optim.hyperparameters import check_hyperparameters
from comm_hooks.optim.private.noised_optimizer import NoisedOptimizer
from comm_hooks.requirements import require_flag


class DPSGD(BatchedOptimizer, NoisedOptimizer):
    r"""DP-SGD's update: gradient descent, with momentum if you like, on the noised gradient.

    With g the noised mean of clipped gradients in ``p.grad`` and b = 0 at first:

    1. theta = (1 - lr weight_decay) theta;
    2. b = momentum b + g;
    3. theta = theta - lr b, or theta - lr (g + momentum b) with ``nesterov``.

    This is :class:`torch.optim.SGD`, which can be used as well, but for the weight decay.  Theirs
    adds weight_decay theta to g and so to the momentum; here, as in AdamW, it stays apart.  Without
    momentum both are the same.  Weight decay depends on the parameters, not on the data: it costs
    no privacy, and is neither clipped nor noised.

    Everything is post-processing of g: what clips, adds noise and accounts for it is the
    :class:`~comm_hooks.optim.private.PrivacyEngine`.  The step is deterministic, so ranks that
    start alike and hold the same gradients stay alike, bit for bit.

    Source: Abadi et al., CCS 2016, Algorithm 1, line "Descent"; with momentum it is DP-SGDM in
    Tang, Shpilevskiy & Lecuyer, "DP-AdamBC", section 3.

    Args:
        params: parameters, named parameters or parameter groups; a group may have its own value of
            any other argument.
        lr: learning rate.
        momentum: in [0, 1).
        nesterov: look ahead; only with momentum.
        weight_decay: decoupled, times ``lr``.

    State per parameter: with momentum ``momentum_buffer`` (b), shaped like it, float32 or wider.
    float16 and bfloat16 parameters are updated in float32 and rounded once.

    Raises:
        ValueError: for hyperparameters out of range, and for sparse or complex gradients.

    Not supported: dampening, a learning rate that is a tensor, ``torch.compile`` of the step.
    Gradients that are not finite are not looked for.

    Example::

        >>> from comm_hooks.optim.private import DPSGD
        >>> optimizer = DPSGD(model.named_parameters(), lr=0.5, momentum=0.9)
        >>> for p in model.parameters():  # what the engine does
        ...     p.grad = 0.01 * torch.randn_like(p)
        >>> optimizer.step()
    """

    def __init__(
        self,
        params: ParamsT,
        lr: float,
        *,
        momentum: float = 0.0,
        nesterov: bool = False,
        weight_decay: float = 0.0,
    ) -> None:
        super().__init__(
            params,
            {"lr": lr, "momentum": momentum, "nesterov": nesterov, "weight_decay": weight_decay},
        )

    def _check_group(self, settings: dict[str, Any]) -> None:
        momentum = settings["momentum"]
        known = {key: settings[key] for key in ("lr", "momentum", "weight_decay")}
        check_hyperparameters(self, **known)
        require_flag(self, "nesterov", settings["nesterov"])
        if settings["nesterov"] and not momentum:
            raise ValueError("DPSGD: nesterov needs momentum: set momentum=0.9, say")

    def _update(self, parameters: list[torch.Tensor], group: dict[str, Any]) -> None:
        dtype = state_dtype(parameters[0].dtype)
        x = widened(parameters, dtype)
        direction = widened([p.grad for p in parameters], dtype)
        if group["momentum"]:
            states = [self.state[p] for p in parameters]
            for parameter, state in zip(parameters, states, strict=True):
                if not state:
                    state["momentum_buffer"] = torch.zeros_like(parameter, dtype=dtype)
            buffers = [state["momentum_buffer"] for state in states]
            torch._foreach_mul_(buffers, group["momentum"])
            torch._foreach_add_(buffers, direction)
            if group["nesterov"]:
                direction = list(torch._foreach_add(direction, buffers, alpha=group["momentum"]))
            else:
                direction = buffers
        if group["weight_decay"]:
            torch._foreach_mul_(x, 1 - group["lr"] * group["weight_decay"])
        torch._foreach_add_(x, direction, alpha=-group["lr"])
        if dtype != parameters[0].dtype:
            torch._foreach_copy_(parameters, x)
