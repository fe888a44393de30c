"""EF21: gradient descent on an aggregate of gradients of which only compressed changes travel."""

import torch
from torch.optim.optimizer import ParamsT

from comm_hooks.exchange import Exchange
from comm_hooks.optim.differences import DifferencesOptimizer
from comm_hooks.optim.hyperparameters import check_hyperparameters


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
    converge, so does the aggregate g, however coarse C is.  Mini-batches keep them from converging:
    EF21 is for large batches.

    With ``collective="sharded"`` the mean of the changes is compressed once more, with error
    feedback, on its way back (EF21-BC in the second paper).

    Differences to the papers: parameters that the exchange exempts from compression travel exactly:
    for them g is the mean of g_i; the momentum is that of :class:`torch.optim.SGD`.

    The optimizer owns the exchange: DDP must not average, so register
    :func:`~comm_hooks.skip_hook`.  If any rank's gradient is not finite, all ranks skip the step,
    also under a ``GradScaler``.

    Args:
        params: parameters, or better ``model.named_parameters()``: saved estimates are then tied to
            names.  Parameter groups are supported.
        exchange: how changes are averaged; its memory must be ``Differences()``.
        lr: learning rate.
        momentum: heavy ball, in [0, 1).
        weight_decay: decoupled.

    State per parameter: ``aggregate`` (g) and, with momentum, ``momentum_buffer`` (b), float32 and
    equal on all ranks; ``step``.  The estimates h_i are the exchange's and differ between ranks:
    save ``exchange.state_dict()`` on every rank beside the optimizer's.

    Cost: one exchange per step, and one number read back from the device, which tells whether the
    step is taken.

    Raises:
        ValueError: for hyperparameters out of range; if the exchange's memory is another.

    Not supported: sparse gradients, parameters on several devices, ``capturable``.

    Example::

        >>> from comm_hooks import Differences, Exchange, TopK, skip_hook
        >>> from comm_hooks.optim.ef21 import EF21
        >>> ddp_model.register_comm_hook(None, skip_hook)
        >>> exchange = Exchange(TopK(density=1 / 64), memory=Differences())
        >>> optimizer = EF21(ddp_model.named_parameters(), exchange, lr=0.1, momentum=0.9)
    """

    def __init__(
        self,
        params: ParamsT,
        exchange: Exchange,
        *,
        lr: float = 1e-3,
        momentum: float = 0.0,
        weight_decay: float = 0.0,
    ) -> None:
        check_hyperparameters(self, lr=lr, momentum=momentum, weight_decay=weight_decay)
        super().__init__(
            params,
            {"lr": lr, "momentum": momentum, "weight_decay": weight_decay},
            exchange,
            {},
        )

    def _step(self, gradients: list[torch.Tensor]) -> None:
        states = self._states("aggregate")
        if not self._aggregate(gradients, states):
            return
        torch._foreach_add_([s["step"] for s in states], 1)
        for own, group in self._groups():
            parameters, members = group["params"], states[own]
            direction = [s["aggregate"] for s in members]
            if group["momentum"]:
                for state in members:
                    if "momentum_buffer" not in state:
                        state["momentum_buffer"] = torch.zeros_like(state["aggregate"])
                buffers = [s["momentum_buffer"] for s in members]
                torch._foreach_mul_(buffers, group["momentum"])
                torch._foreach_add_(buffers, direction)
                direction = buffers
            torch._foreach_mul_(parameters, 1 - group["lr"] * group["weight_decay"])
            torch._foreach_add_(parameters, direction, alpha=-group["lr"])
