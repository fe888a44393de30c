"""CD-Adam and EF21: ranks send compressed changes of their gradients."""

import torch
from torch.optim.optimizer import ParamsT

from comm_hooks.exchange import Exchange
from comm_hooks.optim.base import Group, States, Tensors, block, held
from comm_hooks.optim.exchanging import ExchangingOptimizer
from comm_hooks.optim.moments import adamw_, averages_, count_step, values


class DifferencesOptimizer(ExchangingOptimizer):
    """An optimizer over an estimate of the mean gradient, updated by compressed changes.

    Each rank's :class:`~comm_hooks.Differences` holds the other ranks' estimate of its gradient
    and sends the compressed change.  The aggregate is the sum of the mean changes; for
    parameters that the exchange exempts from compression it is the mean of the gradients itself.
    If gradients converge, their changes and so the compression error vanish.  Gradients of small
    batches do not: use large batches.

    Args:
        exchange: an exchange with the memory ``Differences()``, which holds the ranks' estimates
            h_i and the residuals of owners of shards.

    State per parameter: ``aggregate`` (g), and the tensors that a subclass lists.

    Raises:
        ValueError: if ``exchange.memory`` is not ``Differences()``.
    """

    needs = ("memory",)

    def __init__(self, params: ParamsT, exchange: Exchange, defaults: Group) -> None:
        super().__init__(params, exchange, defaults)
        memory = exchange.memory
        if memory is None or not memory.sends_changes:
            raise ValueError(
                f"{type(self).__name__}: the exchange's memory must be Differences(), got "
                f"{memory}: write Exchange({exchange.compressor}, memory=Differences())"
            )

    def _aggregate(self, gradients: Tensors, states: States) -> bool:
        """Update ``aggregate`` in every state; return whether all ranks' messages were finite."""
        if not self._average(self._named(gradients)):
            return False
        aggregates = values(states, "aggregate")
        exempt = [a for a in aggregates if self.exchange.settings.exempts(a.shape)]
        if exempt:
            torch._foreach_zero_(exempt)
        torch._foreach_add_(aggregates, gradients)
        return True


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
    all c_i themselves, and nothing is lost in step 2: g = h.  There is no warm-up.

    Differences to the authors' code: weight decay is decoupled; each parameter is compressed on its
    own (``granularity="bucket"`` compresses the whole model, or shard of it, as one vector); exempt
    parameters, see :class:`DifferencesOptimizer`.

    Args:
        params, exchange, lr, betas, eps, weight_decay: see :class:`DifferencesOptimizer`.
        bias_correction: divide m by 1 - beta1^t and v_hat by 1 - beta2^t, as the authors' code does
            and their Algorithm 1 does not.

    State per parameter: ``aggregate`` (g), ``exp_avg``, ``exp_avg_sq``, ``max_exp_avg_sq``.

    Example::

        >>> from comm_hooks import Differences, Exchange, Sign, skip_hook
        >>> from comm_hooks.optim import CDAdam
        >>> ddp_model.register_comm_hook(None, skip_hook)
        >>> exchange = Exchange(Sign(), memory=Differences(), collective="sharded")
        >>> optimizer = CDAdam(ddp_model.named_parameters(), exchange, lr=1e-3)
    """

    published = block(compressor="sign", memory="differences", collective="sharded")

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
        defaults = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay}
        super().__init__(params, exchange, {**defaults, "bias_correction": bias_correction})

    def _step(self, gradients: Tensors) -> None:
        states = self._states("aggregate", "exp_avg", "exp_avg_sq", "max_exp_avg_sq")
        if not self._aggregate(gradients, states):
            return
        count_step(states)
        for own, group in self._groups():
            m, v = averages_(states[own], values(states[own], "aggregate"), group["betas"])
            largest = values(states[own], "max_exp_avg_sq")
            torch._foreach_maximum_(largest, v)
            t = int(states[0]["step"]) if group["bias_correction"] else None
            adamw_(held(group), m, largest, group, t)


class EF21(DifferencesOptimizer):
    """SGD over compressed differences of gradients.

    Richtarik, Sokolov & Fatkhullin, "EF21: A New, Simpler, Theoretically Better, and Practically
    Faster Error Feedback", NeurIPS 2021, Algorithm 2; with ``momentum`` EF21-HB (Fatkhullin et al.,
    "EF21 with Bells & Whistles", 2021).  g_i is rank i's gradient, C the compressor; all states
    start at zero:

    1. each rank sends c_i = C(g_i - h_i) and h_i = h_i + c_i;
    2. g = g + mean_i c_i on all ranks;
    3. b = momentum b + g;
    4. x = (1 - lr weight_decay) x - lr b.

    There is no residual that must be worked off: h_i follows the gradient, and where gradients
    converge, so does the aggregate g, however coarse C is.

    With ``collective="sharded"`` the mean of the changes is compressed once more, with error
    feedback, on its way back (EF21-BC in the second paper).

    Differences to the papers: exempt parameters, see :class:`DifferencesOptimizer`; the momentum is
    that of :class:`torch.optim.SGD`.

    Args:
        params, exchange, lr, momentum, weight_decay: see :class:`DifferencesOptimizer`.

    State per parameter: ``aggregate`` (g) and, with momentum, ``momentum_buffer`` (b).

    Example::

        >>> from comm_hooks import Differences, Exchange, TopK, skip_hook
        >>> from comm_hooks.optim import EF21
        >>> ddp_model.register_comm_hook(None, skip_hook)
        >>> exchange = Exchange(TopK(density=1 / 64), memory=Differences())
        >>> optimizer = EF21(ddp_model.named_parameters(), exchange, lr=0.1, momentum=0.9)
    """

    published = block(
        compressor="topk", density=1 / 64, memory="differences", collective="all_gather"
    )

    def __init__(
        self,
        params: ParamsT,
        exchange: Exchange,
        *,
        lr: float = 1e-3,
        momentum: float = 0.0,
        weight_decay: float = 0.0,
    ) -> None:
        defaults = {"lr": lr, "momentum": momentum, "weight_decay": weight_decay}
        super().__init__(params, exchange, defaults)

    def _step(self, gradients: Tensors) -> None:
        states = self._states("aggregate")
        if not self._aggregate(gradients, states):
            return
        count_step(states)
        self._descend_with_momentum(values(states, "aggregate"), states)
