"""What optimizers have in common whose ranks send how much their gradients have changed."""

from collections.abc import Mapping
from typing import Any

import torch
from torch.optim.optimizer import ParamsT

from comm_hooks.exchange import Exchange
from comm_hooks.optim.exchanging import ExchangingOptimizer


class DifferencesOptimizer(ExchangingOptimizer):
    """An optimizer over an aggregate of gradients that the exchange keeps up to date.

    Each rank's :class:`~comm_hooks.Differences` remembers what the others believe its gradient to
    be and sends the compressed change.  The aggregate is the sum of the mean changes; for
    parameters that the exchange exempts from compression it is the mean of the gradients itself.

    Raises:
        ValueError: if the exchange's memory is not one that sends changes.
    """

    def __init__(
        self,
        params: ParamsT,
        defaults: dict[str, Any],
        exchange: Exchange,
        settings: Mapping[str, Any],
    ) -> None:
        if isinstance(exchange, Exchange):
            memory = exchange.memory
            if memory is None or not memory.sends_changes:
                raise ValueError(
                    f"{type(self).__name__}: the exchange's memory must be Differences(), got "
                    f"{memory}: write Exchange({exchange.compressor}, memory=Differences())"
                )
        super().__init__(params, defaults, exchange, settings)

    def _aggregate(
        self, gradients: list[torch.Tensor], states: list[dict[str, torch.Tensor]]
    ) -> bool:
        """Bring ``aggregate`` up to date in every state; return whether all ranks were finite."""
        if not self._average(self._named(gradients)):
            return False
        exempt = [self.exchange.settings.exempts(gradient.shape) for gradient in gradients]
        work = list(zip(exempt, states, gradients, strict=True))
        changed = [(s["aggregate"], g) for is_exempt, s, g in work if not is_exempt]
        replaced = [(s["aggregate"], g) for is_exempt, s, g in work if is_exempt]
        if changed:
            torch._foreach_add_([a for a, _ in changed], [change for _, change in changed])
        if replaced:
            torch._foreach_copy_([a for a, _ in replaced], [mean for _, mean in replaced])
        return True
