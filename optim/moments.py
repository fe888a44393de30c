"""Adam's moments and the steps along them, for parameters that are updated together.

All functions take one tensor per parameter and work in few kernels (``torch._foreach``).
"""

from collections.abc import Sequence

import torch

from comm_hooks.optim.base import Group, States, Tensors


def values(states: States, key: str) -> Tensors:
    """Return ``state[key]`` of every state."""
    return [state[key] for state in states]


def prepared(
    states: States, parameters: Sequence[torch.Tensor], dtype: torch.dtype, *keys: str
) -> States:
    """Return states after adding missing entries: ``step``, and zeros under each of ``keys``."""
    for state in states:
        if "step" not in state:
            state["step"] = torch.tensor(0.0, dtype=torch.float32)
    for key in keys:
        zeros(states, key, parameters, dtype)
    return states


def count_step(states: States) -> None:
    """Add 1 to every state's ``step``."""
    torch._foreach_add_(values(states, "step"), 1)


def zeros(
    states: States, key: str, like: Sequence[torch.Tensor], dtype: torch.dtype | None = None
) -> Tensors:
    """Return ``state[key]`` of every state, after adding zeros where it is missing."""
    for state, tensor in zip(states, like, strict=True):
        if key not in state:
            state[key] = torch.zeros_like(tensor, dtype=dtype)
    return values(states, key)


def average_(m: Tensors, new: Tensors, beta: float) -> None:
    """Set m to beta m + (1 - beta) new."""
    torch._foreach_lerp_(m, new, 1 - beta)


def average_squares_(v: Tensors, new: Tensors, beta: float) -> None:
    """Set v to beta v + (1 - beta) new^2."""
    torch._foreach_mul_(v, beta)
    torch._foreach_addcmul_(v, new, new, 1 - beta)


def averages_(states: States, new: Tensors, betas: Sequence[float]) -> tuple[Tensors, Tensors]:
    """Update Adam's averages ``exp_avg`` (m) and ``exp_avg_sq`` (v) with ``new``; return both."""
    m, v = values(states, "exp_avg"), values(states, "exp_avg_sq")
    average_(m, new, betas[0])
    average_squares_(v, new, betas[1])
    return m, v


def roots(v: Tensors, eps: float, correction: float = 1.0) -> Tensors:
    """Return sqrt(v / correction) + eps."""
    found = list(torch._foreach_sqrt(v))
    if correction != 1:
        torch._foreach_div_(found, correction**0.5)
    torch._foreach_add_(found, eps)
    return found


def corrected(v: Tensors, beta: float, steps: Sequence[int]) -> Tensors:
    """Return v / (1 - beta^t), with t the number of ``steps`` of each parameter."""
    return list(torch._foreach_div(v, [1 - beta**t for t in steps]))


def shortened(beta1: float, horizon: float) -> float:
    """Return the decay rate of a momentum with a share of the horizon of ``beta1``, at least 0.

    For optimizers with error feedback: residuals act as a momentum as well.
    """
    return beta1 if horizon == 1 else max(0.0, 1 - (1 - beta1) / horizon)


def momentum_(buffers: Tensors, new: Tensors, momentum: float) -> Tensors:
    """Set each buffer to momentum * buffer + new, and return the buffers."""
    torch._foreach_mul_(buffers, momentum)
    torch._foreach_add_(buffers, new)
    return buffers


def decay_(parameters: Tensors, group: Group) -> None:
    """Multiply the parameters by 1 - lr weight_decay: decoupled weight decay, as in AdamW."""
    if group["weight_decay"]:
        torch._foreach_mul_(parameters, 1 - group["lr"] * group["weight_decay"])


def descend_(
    parameters: Tensors, directions: Tensors, group: Group, correction: float = 1.0
) -> None:
    """Decay the parameters as :func:`decay_` does, and subtract lr / correction directions."""
    decay_(parameters, group)
    torch._foreach_add_(parameters, directions, alpha=-group["lr"] / correction)


def adamw_(parameters: Tensors, m: Tensors, v: Tensors, group: Group, t: int | None) -> None:
    """Take step number ``t`` of AdamW in place; without bias correction if ``t`` is None."""
    c1, c2 = (1 - beta**t if t is not None else 1.0 for beta in group["betas"])
    directions = list(torch._foreach_div(m, roots(v, group["eps"], c2)))
    descend_(parameters, directions, group, c1)


def normalized_average_(m: Tensors, new: Tensors, v: Tensors, group: Group, t: int) -> None:
    """Update LaProp's averages in step ``t``, in place: v of squares, m of scaled gradients.

    1. v = beta2 v + (1 - beta2) new^2,
    2. m = beta1 m + (1 - beta1) new / (sqrt(v / (1 - beta2^t)) + eps).

    That is one step of AdamW without momentum, with beta2 and v as here, on the parameter m: it
    shrinks by 1 - lr weight_decay = beta1, and moves by -lr = 1 - beta1.  PyTorch has it in one
    pass over memory.
    """
    beta1, beta2 = group["betas"]
    new = [_laid_out_like(g.to(n.dtype), n) for g, n in zip(new, m, strict=True)]
    step = torch.full((), float(t), device=m[0].device, dtype=torch.float32)
    torch._fused_adamw_(
        m,
        new,
        new,  # without momentum, the first moment is the gradient itself
        v,
        [],
        [step] * len(m),
        lr=beta1 - 1,
        beta1=0.0,
        beta2=beta2,
        weight_decay=-1.0,
        eps=group["eps"],
        amsgrad=False,
        maximize=False,
    )


def along_(parameters: Tensors, directions: Tensors, group: Group, correction: float) -> None:
    """Step as :func:`descend_` does, in one pass over memory where all is float32 and dense."""
    if any(p.dtype != torch.float32 or not _is_dense(p) for p in parameters):
        descend_(parameters, directions, group, correction)
        return
    directions = [_laid_out_like(n, p) for n, p in zip(directions, parameters, strict=True)]
    # theta - lr / correction (n + correction weight_decay theta)
    torch._fused_sgd_(
        parameters,
        directions,
        [],
        weight_decay=correction * group["weight_decay"],
        momentum=0.0,
        lr=group["lr"] / correction,
        dampening=0.0,
        nesterov=False,
        maximize=False,
        is_first_step=False,
    )


def _is_dense(tensor: torch.Tensor) -> bool:
    """Return whether a tensor's elements fill one range of memory, as fused kernels assume."""
    if tensor.is_contiguous():
        return True
    sizes = zip(tensor.shape, tensor.stride(), strict=True)
    return 1 + sum((size - 1) * stride for size, stride in sizes) == tensor.numel()


def _laid_out_like(tensor: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    """Return ``tensor`` with the strides of ``other``, because fused kernels ignore strides."""
    if tensor.stride() == other.stride():
        return tensor
    return torch.empty_like(other, dtype=tensor.dtype).copy_(tensor)
