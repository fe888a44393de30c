"""SGD on mean gradients that are compressed in both directions."""

from torch.optim.optimizer import ParamsT

from comm_hooks.exchange import Exchange
from comm_hooks.optim.base import Tensors, block
from comm_hooks.optim.exchanging import ExchangingOptimizer
from comm_hooks.optim.moments import count_step


class CocktailSGD(ExchangingOptimizer):
    r"""SGD with error feedback at ranks and at owners of shards.

    CocktailSGD (Wang et al., ICML 2023, section 3), with C = :class:`~comm_hooks.Cocktail`
    (random subset, top-k within it, 4 bits).  Per step t:

    1. each rank adds gradient and residual, a_i = g_i + e_i; it sends C(a_i) and keeps
       e_i = a_i - C(a_i);
    2. the owner of each shard: b = mean_i C(a_i) + s; it sends C(b) to all and keeps s = b - C(b);
    3. A = all C(b) together;
    4. u = momentum u + A;
    5. theta = (1 - lr weight_decay) theta - lr u.

    The exchange takes steps 1 to 3, with ``collective="sharded"``; with ``"all_gather"`` step 2 is
    left out.  Exempt parameters are averaged exactly.

    Differences to the authors' code: here the gradient is compressed, there the
    difference between the local and the shared model; no step is applied late; momentum is
    applied after the exchange; for the compressor's differences see :class:`~comm_hooks.Cocktail`.

    Args:
        params, lr, momentum, weight_decay: see
            :class:`~comm_hooks.optim.exchanging.ExchangingOptimizer`.
        exchange: the exchange of steps 1 to 3, with error feedback unless C is unbiased.

    State per parameter: with momentum ``momentum_buffer`` (u).

    Not supported: the authors' overlap of communication and computation.

    Example::

        >>> from comm_hooks import ErrorFeedback, skip_hook
        >>> from comm_hooks.compressors.cocktail import Cocktail
        >>> ddp_model.register_comm_hook(None, skip_hook)
        >>> exchange = Exchange(Cocktail(mask=0.1, density=0.2), ErrorFeedback(), "sharded")
        >>> optimizer = CocktailSGD(ddp_model.named_parameters(), exchange, lr=0.1, momentum=0.9)
    """

    published = block(
        compressor="cocktail", mask=0.1, density=0.2, memory="error_feedback", collective="sharded"
    )

    def __init__(
        self,
        params: ParamsT,
        exchange: Exchange,
        *,
        lr: float,
        momentum: float = 0.0,
        weight_decay: float = 0.0,
    ) -> None:
        defaults = {"lr": lr, "momentum": momentum, "weight_decay": weight_decay}
        super().__init__(params, exchange, defaults)
        memory = exchange.memory
        if memory is None and not exchange.compressor.unbiased:
            raise ValueError(
                f"CocktailSGD: {exchange.compressor} drops elements for ever; give the exchange "
                "memory=ErrorFeedback()"
            )
        if memory is not None and memory.sends_changes:
            raise ValueError(
                f"CocktailSGD: memory must be ErrorFeedback; {memory} sends changes of gradients"
            )

    def _step(self, gradients: Tensors) -> None:
        states = self._states()
        if not self._average(self._named(gradients)):
            return
        self._descend_with_momentum(gradients, states)
        count_step(states)
