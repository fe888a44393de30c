"""CD-Adam: AMSGrad on an aggregate of gradients of which only compressed changes travel."""

import torch
from torch.optim.optimizer import ParamsT

from comm_hooks.exchange import Exchange
from comm_hooks.optim.differences import DifferencesOptimizer
from comm_hooks.optim.hyperparameters import check_hyperparameters
from comm_hooks.requirements import require_flag


class CDAdam(DifferencesOptimizer):
    """AMSGrad over compressed differences of gradients, in both directions.

    Wang, Lin & Chen, "Communication-Compressed Adaptive Gradient Method for Distributed Nonconvex
    Optimization", AISTATS 2022, Algorithm 1.  g_i is rank i's gradient, C the compressor; all
    states start at zero:

    1. each rank sends c_i = C(g_i - h_i) and h_i = h_i + c_i;
    2. the server forms h = h + mean_i c_i and sends c = C(h - g);
    3. g = g + c on all ranks;
    4. m = beta1 m + (1 - beta1) g,  v = beta2 v + (1 - beta2) g^2,  v_hat = max(v_hat, v);
    5. x = (1 - lr weight_decay) x - lr m / (sqrt(v_hat) + eps).

    Steps 1 and 2 are the exchange's: ``Exchange(Sign(), Differences(), collective="sharded")``, in
    which every rank is the server of its shard.  With ``collective="all_gather"`` the ranks add up
    everybody's c_i themselves, and nothing is lost in step 2: g = h.  There is no warm-up.

    As the gradients converge, their changes and so the compression error vanish, but only if they
    do: with mini-batches every change is mostly noise, which a contractive compressor sends with a
    delay.  Large batches suit it.

    Differences to the authors' code: weight decay is decoupled; each parameter is compressed on its
    own (``granularity="bucket"`` compresses the whole model, or shard of it, as one vector);
    parameters that the exchange exempts from compression travel exactly: for them g is the mean of
    g_i.

    The optimizer owns the exchange: DDP must not average, so register
    :func:`~comm_hooks.skip_hook`.  If any rank's gradient is not finite, all ranks skip the step,
    also under a ``GradScaler``.

    Args:
        params: parameters, or better ``model.named_parameters()``: saved estimates are then tied to
            names.  Parameter groups are supported.
        exchange: how changes are averaged; its memory must be ``Differences()``.
        lr: learning rate.
        betas: decay of the first and the second moment.
        eps: added to the denominator.
        weight_decay: decoupled (AdamW).
        bias_correction: divide m by 1 - beta1^t and v_hat by 1 - beta2^t, as the authors' code does
            and their Algorithm 1 does not.

    State per parameter: ``step``, ``aggregate`` (g), ``exp_avg``, ``exp_avg_sq``,
    ``max_exp_avg_sq``, float32 and equal on all ranks.  The estimates h_i, and what a server has
    not sent yet, are the exchange's and differ between ranks: save ``exchange.state_dict()`` on
    every rank beside the optimizer's.

    Cost: one exchange per step (two collectives if sharded), and one number read back from the
    device, which tells whether the step is taken.

    Raises:
        ValueError: for hyperparameters out of range; if the exchange's memory is another.

    Not supported: sparse gradients, parameters on several devices, ``capturable``.

    Example::

        >>> from comm_hooks import Differences, Exchange, Sign, skip_hook
        >>> from comm_hooks.optim.cd_adam import CDAdam
        >>> ddp_model.register_comm_hook(None, skip_hook)
        >>> exchange = Exchange(Sign(), memory=Differences(), collective="sharded")
        >>> optimizer = CDAdam(ddp_model.named_parameters(), exchange, lr=1e-3)
    """

    def __init__(
        self,
        params: ParamsT,
        exchange: Exchange,
        *,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.99),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        bias_correction: bool = False,
    ) -> None:
        require_flag(self, "bias_correction", bias_correction)
        check_hyperparameters(self, betas=betas, lr=lr, eps=eps, weight_decay=weight_decay)
        super().__init__(
            params,
            {
                "lr": lr,
                "betas": betas,
                "eps": eps,
                "weight_decay": weight_decay,
                "bias_correction": bias_correction,
            },
            exchange,
            {"bias_correction": bias_correction},
        )

    def _step(self, gradients: list[torch.Tensor]) -> None:
        states = self._states("aggregate", "exp_avg", "exp_avg_sq", "max_exp_avg_sq")
        if not self._aggregate(gradients, states):
            return
        for own, group in self._groups():
            parameters, members = group["params"], states[own]
            lr, (beta1, beta2) = group["lr"], group["betas"]
            steps = [s["step"] for s in members]
            aggregate = [s["aggregate"] for s in members]
            m = [s["exp_avg"] for s in members]
            v = [s["exp_avg_sq"] for s in members]
            largest = [s["max_exp_avg_sq"] for s in members]

            torch._foreach_add_(steps, 1)
            torch._foreach_lerp_(m, aggregate, 1 - beta1)
            torch._foreach_mul_(v, beta2)
            torch._foreach_addcmul_(v, aggregate, aggregate, value=1 - beta2)
            torch._foreach_maximum_(largest, v)
            roots = torch._foreach_sqrt(largest)
            if group["bias_correction"]:
                t = int(steps[0])
                lr = lr / (1 - beta1**t)
                torch._foreach_div_(roots, (1 - beta2**t) ** 0.5)
            torch._foreach_add_(roots, group["eps"])
            torch._foreach_mul_(parameters, 1 - group["lr"] * group["weight_decay"])
            torch._foreach_add_(parameters, torch._foreach_div(m, roots), alpha=-lr)
