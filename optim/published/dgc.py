"""Deep Gradient Compression: SGD with momentum correction and a warm-up of the density."""

import dataclasses
import math
from typing import Literal

import torch
from torch.optim.optimizer import ParamsT

from comm_hooks.compressors.base import Compressor
from comm_hooks.compressors.sparse import RandomK, TopK
from comm_hooks.exchange import Exchange
from comm_hooks.memory.momentum_correction import MomentumCorrection
from comm_hooks.optim.base import Tensors, block
from comm_hooks.optim.exchanging import ExchangingOptimizer
from comm_hooks.optim.moments import count_step, momentum_, zeros
from comm_hooks.requirements import require_integer, require_within

# The warm-up goes from this density to the compressor's in as many steps as the paper's.
FIRST_DENSITY = 0.25
DENSITIES = 5


class DGC(ExchangingOptimizer):
    r"""SGD on the largest elements of each rank's accumulated momentum.

    Deep Gradient Compression (Lin, Han, Mao, Wang & Dally, ICLR 2018).  The exchange's
    :class:`~comm_hooks.memory.MomentumCorrection` holds momentum and residual.  Per step:

    1. each of N ranks clips its gradient g_i, all parameters together, to clip_norm / sqrt(N);
    2. each rank: u = momentum u + g_i; residual e = e + u; it sends the largest elements c_i of e;
       e = e - c_i, and u = 0 where c_i is not 0;
    3. theta = (1 - lr weight_decay) theta - lr mean_i c_i.

    Exempt parameters arrive exactly and take steps of SGD with the same momentum.

    During the first ``warmup_steps`` the density falls, from 1/4 to the compressor's r in five
    values of a constant ratio: 1/4, ..., r.  The first four take a quarter of the warm-up each.
    (With r = 0.001, 0.25, 0.063, 0.016, 0.004, 0.001 as in the paper.)

    Differences to the paper: the weight decay is decoupled, where there it is a part of the
    gradient; selection is exact, where theirs samples a threshold; no Nesterov momentum.

    Args:
        params, lr, weight_decay: see :class:`~comm_hooks.optim.exchanging.ExchangingOptimizer`.
        exchange: an exchange with TopK or RandomK(unbiased=False), and with MomentumCorrection,
            which has the momentum.
        warmup_steps: the number of steps with a higher density than the compressor's; may be 0.
        clip_norm: the norm to which the mean gradient is to be clipped; None for no clipping.

    State per exempt parameter: ``momentum_buffer``.

    Example::

        >>> from comm_hooks import TopK, skip_hook
        >>> from comm_hooks.memory import MomentumCorrection
        >>> ddp_model.register_comm_hook(None, skip_hook)
        >>> exchange = Exchange(TopK(density=0.001), MomentumCorrection(0.9))
        >>> optimizer = DGC(
        ...     ddp_model.named_parameters(), exchange, lr=0.1, warmup_steps=1000, clip_norm=1.0
        ... )
    """

    published = block(
        compressor="topk", density=0.001, memory="momentum_correction", collective="all_gather"
    )
    needs = ("memory",)

    def __init__(
        self,
        params: ParamsT,
        exchange: Exchange,
        *,
        lr: float,
        weight_decay: float = 0.0,
        warmup_steps: int = 0,
        clip_norm: float | None = None,
    ) -> None:
        require_integer(self, "warmup_steps", warmup_steps)
        require_within(self, "warmup_steps", warmup_steps, "[0, inf)")
        if clip_norm is not None:
            require_within(self, "clip_norm", clip_norm, "(0, inf)")
        super().__init__(
            params,
            exchange,
            {"lr": lr, "weight_decay": weight_decay},
            warmup_steps=warmup_steps,
            clip_norm=clip_norm,
        )
        if not isinstance(exchange.memory, MomentumCorrection):
            raise ValueError(
                "DGC: the exchange's memory must be MomentumCorrection, which holds the momentum; "
                f"got {exchange.memory}"
            )
        if not isinstance(exchange.compressor, TopK | RandomK):
            raise ValueError(
                "DGC: the compressor must leave elements out (TopK, RandomK), or every step clears "
                f"all momenta; got {exchange.compressor}"
            )
        self.momentum = exchange.memory.momentum
        self.warmup_steps = warmup_steps
        self.clip_norm = clip_norm
        self._compressor = exchange.compressor

    def _step(self, gradients: Tensors) -> None:
        states = self._states()
        if self.clip_norm is not None:
            self._clip(gradients, self.clip_norm)
        compress = self._sparser(int(states[0]["step"]))
        if not self._average(self._named(gradients), compress=compress):
            return
        exempt = [i for i, g in enumerate(gradients) if self.exchange.settings.exempts(g.shape)]
        if exempt:
            new = [gradients[i] for i in exempt]
            buffers = zeros([states[i] for i in exempt], "momentum_buffer", new)
            for i, update in zip(exempt, momentum_(buffers, new, self.momentum), strict=True):
                gradients[i] = update
        self._descend(gradients)
        count_step(states)

    def _clip(self, gradients: Tensors, clip_norm: float) -> None:
        """Clip this rank's gradients in place to the norm clip_norm / sqrt(number of ranks)."""
        norms = torch._foreach_norm(gradients, 2, dtype=torch.float64)
        norm = torch.linalg.vector_norm(torch.stack(norms))
        limit = clip_norm / math.sqrt(self.exchange.transport.world_size)
        # If it is not finite, all ranks skip the step.
        factor = (limit / norm).clamp_(max=1).add_(norm - norm)
        torch._foreach_mul_(gradients, factor.float())

    def _sparser(self, step: int) -> Compressor | Literal[True]:
        """Return the denser compressor of a warm-up step, or True for the exchange's compressor."""
        ratio = self._compressor.density / FIRST_DENSITY
        if step >= self.warmup_steps or ratio >= 1:
            return True
        passed = (DENSITIES - 1) * step // self.warmup_steps / (DENSITIES - 1)
        return dataclasses.replace(self._compressor, density=FIRST_DENSITY * ratio**passed)
