"""1-bit Adam's update for gradients that a comm hook or ZeRO has averaged."""

import torch
from torch.optim.optimizer import ParamsT

from comm_hooks.optim.base import BatchedOptimizer, Group, Tensors, state_dtype, widened
from comm_hooks.optim.hyperparameters import check_freeze_step, check_hyperparameters
from comm_hooks.optim.moments import average_, average_squares_, count_step, prepared, values
from comm_hooks.optim.published.freezing import step_


class FrozenVarianceAdam(BatchedOptimizer):
    r"""Adam with a second moment that stays as it is after ``freeze_step`` steps.

    An ordinary optimizer for gradients that are the same on all ranks.  With u the gradient and
    m = v = 0 at first:

    1. m = beta1 m + (1 - beta1) u;
    2. v = beta2 v + (1 - beta2) u^2, in the first ``freeze_step`` steps only;
    3. x = (1 - lr weight_decay) x - lr m / (sqrt(v) + eps), and no step where v = 0.

    From ``freeze_step`` on the step is linear in u, as error feedback needs: a gradient that
    arrives late counts as much as if it had come in time.  Adam divides it by
    its own size.  Average exactly until then, with ``start_compression_step=freeze_step``.

    This replaces :class:`~comm_hooks.optim.OneBitAdam` where ranks keep parts of the
    state only (ZeRO 1 and 2): OneBitAdam compresses momenta, for which every rank needs the whole
    of m, and m arrives compressed in both directions.  Here gradients are compressed, and m and v
    may be in parts, since every line of the algorithm is element by element.

    Source: Tang et al., "1-bit Adam", ICML 2021, Algorithm 1, with the compression moved from the
    momentum to the gradient; there is no bias correction, as there.

    Args:
        params: parameters, named parameters or parameter groups; a group may have its own value of
            any other argument.
        lr, betas, eps, weight_decay: as in :class:`~comm_hooks.optim.Adam`.
        freeze_step: the last step with a gradient that enters v, at least 1.  The authors of 1-bit
            Adam advise 15 to 25 % of all steps.
        total_steps: the number of steps of the run, if known, which must exceed ``freeze_step``.

    State per parameter: ``step``, a float32 number on the CPU, and in the parameter's shape
    ``exp_avg`` (m) and ``exp_avg_sq`` (v), float32 or wider.

    Raises:
        ValueError: for hyperparameters out of range, and for a ``freeze_step`` beyond
            ``total_steps``.

    Not supported: the same as in :class:`~comm_hooks.optim.Adam`.

    Example::

        >>> from comm_hooks import Sign, register
        >>> signs = Sign(block_size=None, scale="rms")
        >>> state = register(ddp_model, signs, start_compression_step=200)
        >>> optimizer = FrozenVarianceAdam(ddp_model.named_parameters(), lr=1e-3, freeze_step=200)
        >>> ddp_model(torch.ones(1, 8)).square().sum().backward()
        >>> optimizer.step()
    """

    def __init__(
        self,
        params: ParamsT,
        lr: float = 1e-3,
        *,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        freeze_step: int,
        total_steps: int | None = None,
    ) -> None:
        check_freeze_step(self, freeze_step, total_steps)
        super().__init__(
            params,
            {
                "lr": lr,
                "betas": betas,
                "eps": eps,
                "weight_decay": weight_decay,
                "freeze_step": freeze_step,
            },
        )

    def _check_group(self, settings: Group) -> None:
        check_freeze_step(self, settings["freeze_step"], None)
        check_hyperparameters(self, **{k: v for k, v in settings.items() if k != "freeze_step"})

    def _update(self, parameters: Tensors, group: Group) -> None:
        dtype = state_dtype(parameters[0].dtype)
        states = [self.state[p] for p in parameters]
        prepared(states, parameters, dtype, "exp_avg", "exp_avg_sq")
        m, v = values(states, "exp_avg"), values(states, "exp_avg_sq")
        x, u = widened(parameters, dtype), widened([p.grad for p in parameters], dtype)

        count_step(states)
        average_(m, u, group["betas"][0])
        # The counts are on the CPU: reading them does not wait for a device.
        steps = torch.stack(values(states, "step")).tolist()
        moving = [i for i, step in enumerate(steps) if step <= group["freeze_step"]]
        if moving:
            average_squares_([v[i] for i in moving], [u[i] for i in moving], group["betas"][1])
        step_(x, m, v, group)
        if parameters[0].dtype != dtype:
            torch._foreach_copy_(parameters, x)
