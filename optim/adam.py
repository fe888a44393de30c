"""Adam and AMSGrad as the servers of federated learning run them: without bias correction."""

from typing import Any, ClassVar

import torch
from torch.optim.optimizer import ParamsT

from comm_hooks.optim.base import BatchedOptimizer, Group, Tensors, state_dtype, widened
from comm_hooks.optim.hyperparameters import check_hyperparameters
from comm_hooks.optim.moments import averages_, count_step, prepared, values
from comm_hooks.requirements import require_flag


class Adam(BatchedOptimizer):
    r"""Adam without bias correction by default, as the server optimizer of federated learning.

    An ordinary optimizer for gradients that are the same on all ranks: those that a comm hook has
    averaged, or the mean displacement of :class:`~comm_hooks.optim.LocalRounds`.  The step
    is deterministic, so ranks that start equal stay equal, bit for bit.  With u the gradient and
    m = v = 0 at first:

    1. m = beta1 m + (1 - beta1) u;
    2. v = beta2 v + (1 - beta2) u^2;
    3. x = (1 - lr weight_decay) x - lr m / (sqrt(v) + eps).

    With ``bias_correction`` step 3 uses m / (1 - beta1^t) and v / (1 - beta2^t) instead, and this
    is :class:`torch.optim.AdamW`.  Without it m and v both start too small, and m catches up
    sooner: in the first steps m / sqrt(v) of a constant gradient rises to 6.6 with betas
    (0.9, 0.999), to 2.1 with (0.9, 0.99).  Let the learning rate warm up, or correct the bias.

    For u = eta g, SAFL's update after one local step of size eta, the step is that for the gradient
    g itself with eps / eta for eps.

    Source: SAFL (Chen, Li & Banerjee, "Sketched Adaptive Federated Deep Learning"), Algorithm 1
    with Adam for ADA_OPT; Adam is Kingma & Ba, ICLR 2015; decoupled weight decay is Loshchilov &
    Hutter, ICLR 2019.

    Args:
        params: parameters, named or not, or groups; a group may have its own value of any argument.
        lr: learning rate (SAFL's kappa).  Schedulers may change it; it does not make
            ``torch.compile`` compile ``step`` again.
        betas: decay of the first and the second moment, each in [0, 1).
        eps: added to the denominator.
        weight_decay: decoupled as in AdamW: multiplied by ``lr``, and no part of the moments.
        bias_correction: divide the moments by 1 - beta^t; t counts a parameter's own steps.
        foreach: False updates one parameter at a time, slower and in less memory; otherwise
            parameters of one device and dtype are updated together.
        maximize: ascend along the gradient instead of descending.

    State per parameter: ``step``, a float32 number on the CPU, and in the parameter's shape
    ``exp_avg`` (m) and ``exp_avg_sq`` (v).  They are float32 for float16 and bfloat16 parameters,
    also in checkpoints; the new parameter is computed in float32 and rounded once.  Changes that
    are too small for a bfloat16 parameter are lost: keep the parameters in float32 and train under
    ``torch.autocast``.  A checkpoint of :class:`torch.optim.AdamW` can be loaded.  Parameters that
    FSDP2 has sharded (DTensors) have a state that is sharded in the same way.

    Raises:
        ValueError: for hyperparameters out of range.

    Not supported: sparse and complex gradients; a learning rate that is a tensor; ``capturable``,
    ``differentiable`` and ``fused``.  Gradients that are not finite are not looked for: that is for
    a ``GradScaler`` or ``clip_grad_norm_(..., error_if_nonfinite=True)``.

    Example::

        >>> from comm_hooks import register
        >>> state = register(ddp_model, "count_sketch", ratio=0.05)
        >>> optimizer = Adam(ddp_model.named_parameters(), lr=1e-3, betas=(0.9, 0.99))
        >>> ddp_model(torch.ones(1, 8)).square().sum().backward()
        >>> optimizer.step()
    """

    _amsgrad: ClassVar[bool] = False
    """Whether steps divide by the maximum of the second moment."""

    def __init__(
        self,
        params: ParamsT,
        lr: float = 1e-3,
        *,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        bias_correction: bool = False,
        foreach: bool | None = None,
        maximize: bool = False,
    ) -> None:
        super().__init__(
            params,
            {
                "lr": lr,
                "betas": betas,
                "eps": eps,
                "weight_decay": weight_decay,
                "bias_correction": bias_correction,
                "foreach": foreach,
                "maximize": maximize,
            },
        )

    def _check_group(self, settings: Group) -> None:
        check_hyperparameters(self, **{k: v for k, v in settings.items() if k != "foreach"})
        if settings["foreach"] is not None:
            require_flag(self, "foreach", settings["foreach"])

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        for group in self.param_groups:
            # Checkpoints of torch.optim.AdamW do not have all of the settings.
            for key, value in self.defaults.items():
                group.setdefault(key, value)

    def _update(self, parameters: Tensors, group: Group) -> None:
        parts = [[p] for p in parameters] if group["foreach"] is False else [parameters]
        for part in parts:
            self._update_part(part, group)

    def _state_of(self, parameter: torch.Tensor) -> dict[str, torch.Tensor]:
        state, dtype = self.state[parameter], state_dtype(parameter.dtype)
        keys = ["exp_avg", "exp_avg_sq"] + ["max_exp_avg_sq"] * self._amsgrad
        # Each if it is missing, so that AMSGrad can go on from a checkpoint of Adam.
        prepared([state], [parameter], dtype, *keys)
        for key in keys:
            # From torch's optimizers, or from a model in another dtype.
            if state[key].dtype != dtype:
                state[key] = state[key].to(dtype)
        return state

    def _update_part(self, parameters: Tensors, group: Group) -> None:
        states = [self._state_of(p) for p in parameters]
        lr, (beta1, beta2), eps = group["lr"], group["betas"], group["eps"]
        dtype = states[0]["exp_avg"].dtype
        x, u = widened(parameters, dtype), widened([p.grad for p in parameters], dtype)

        count_step(states)
        m, v = averages_(states, u, group["betas"])
        if self._amsgrad:
            largest = values(states, "max_exp_avg_sq")
            torch._foreach_maximum_(largest, v)
            v = largest
        roots = torch._foreach_sqrt(v)
        if group["bias_correction"]:
            # (m / c1) / (sqrt(v / c2) + eps) = m / (sqrt(v) c1 / sqrt(c2) + c1 eps)
            t = torch.stack(values(states, "step")).double()
            c1, c2 = 1 - beta1**t, 1 - beta2**t
            torch._foreach_mul_(roots, _numbers(c1 / c2.sqrt()))
            torch._foreach_add_(roots, _numbers(c1 * eps))
        else:
            torch._foreach_add_(roots, eps)

        if torch.compiler.is_compiling():
            # A number would be part of the graph, compiled anew for each that a scheduler sets.
            lr = lr * torch.ones((), dtype=torch.float64)
        if group["weight_decay"]:
            torch._foreach_mul_(x, 1 - lr * group["weight_decay"])
        signed = lr if group["maximize"] else -lr
        if torch.compiler.is_compiling():
            directions = torch._foreach_div(m, roots)
            torch._foreach_mul_(directions, signed)
            torch._foreach_add_(x, directions)
        else:
            torch._foreach_addcdiv_(x, m, roots, value=signed)
        if parameters[0].dtype != dtype:
            for parameter, precise in zip(parameters, x, strict=True):
                # _foreach_copy_ has no rule for the DTensors of a sharded model.
                parameter.copy_(precise)


class AMSGrad(Adam):
    r"""AMSGrad, the server optimizer of SAFL: Adam with a second moment that never falls.

    With u the gradient, the same on all ranks, and m = v = v_hat = 0 at first:

    1. m = beta1 m + (1 - beta1) u;
    2. v = beta2 v + (1 - beta2) u^2;
    3. v_hat = max(v_hat, v);
    4. x = (1 - lr weight_decay) x - lr m / (sqrt(v_hat) + eps).

    With ``bias_correction`` step 4 uses m / (1 - beta1^t) and v_hat / (1 - beta2^t), and this is
    :class:`torch.optim.AdamW` with ``amsgrad=True``: the maximum is that of the *uncorrected* v.
    The other order, the maximum of the corrected v, would keep the estimate from the first gradient
    alone for ever.  The price: while 1 - beta2^t still grows, denominators may fall, against the
    purpose of AMSGrad.  Without the correction, the default here, they never do.

    One large gradient makes all later steps smaller: clip.

    Source: SAFL (Chen, Li & Banerjee, "Sketched Adaptive Federated Deep Learning"), Algorithm 2;
    Reddi, Kale & Kumar, ICLR 2018, Algorithm 2.

    Args:
        params, lr, betas, eps, weight_decay, bias_correction, foreach, maximize: see :class:`Adam`,
            also for the size of the first steps, precision, errors and limits.

    State per parameter: that of :class:`Adam`, and ``max_exp_avg_sq`` (v_hat), a third tensor of
    the parameter's shape.  In a checkpoint of ``Adam`` it is missing, and starts at zero.

    Raises:
        ValueError: for hyperparameters out of range.

    Not supported: the same as in :class:`Adam`.

    Example::

        >>> from comm_hooks import register
        >>> state = register(ddp_model, "srht", ratio=0.05)
        >>> optimizer = AMSGrad(ddp_model.named_parameters(), lr=1e-3, betas=(0.9, 0.99))
        >>> ddp_model(torch.ones(1, 8)).square().sum().backward()
        >>> torch.nn.utils.clip_grad_norm_(ddp_model.parameters(), 1.0).isfinite()
        tensor(True)
        >>> optimizer.step()
    """

    _amsgrad = True


def _numbers(values: torch.Tensor) -> list[float] | list[torch.Tensor]:
    """Return the elements of a CPU vector: numbers, or tensors while ``torch.compile`` traces."""
    if torch.compiler.is_compiling():
        # Reading numbers would end the graph.
        return list(values.unbind())
    return values.tolist()
