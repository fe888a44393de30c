"""DiLoCo and SparseLoCo: local AdamW, and an outer step with or without momentum."""

from typing import Any

from torch.optim import SGD, AdamW
from torch.optim.optimizer import ParamsT

from comm_hooks.exchange import Exchange
from comm_hooks.memory.error_feedback import ErrorFeedback
from comm_hooks.optim.hyperparameters import check_hyperparameters
from comm_hooks.optim.rounds.local_rounds import LocalRounds
from comm_hooks.requirements import require_kind, require_within


class DiLoCo(LocalRounds):
    """Local AdamW and outer Nesterov momentum.

    Douillard et al., "DiLoCo: Distributed Low-Communication Training of Language Models", 2023,
    Algorithm 1; with ``fragments`` > 1 Streaming DiLoCo (2025), without its overlap.
    :class:`LocalRounds` with AdamW inside and SGD with Nesterov momentum as the server.

    Args:
        params: the model's parameters, better named.
        exchange: any; with ``Identity()`` this is DiLoCo as published.
        lr, betas, eps, weight_decay: of the inner AdamW.
        local_steps: H.
        outer_lr, outer_momentum: the server's.  With 1 and 0 it is the plain average.
        fragments: see :class:`LocalRounds`.

    Not supported: see :class:`LocalRounds`.

    Example::

        >>> from comm_hooks import Exchange, Quantize, ErrorFeedback
        >>> from comm_hooks.optim import DiLoCo
        >>> exchange = Exchange(Quantize(bits=4), memory=ErrorFeedback())
        >>> rounds = DiLoCo(model.named_parameters(), exchange, lr=1e-3, local_steps=100)
    """

    def __init__(
        self,
        params: ParamsT,
        exchange: Exchange,
        *,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.1,
        local_steps: int,
        outer_lr: float = 0.7,
        outer_momentum: float = 0.9,
        fragments: int = 1,
    ) -> None:
        check_hyperparameters(
            self, betas=betas, lr=lr, eps=eps, weight_decay=weight_decay, outer_lr=outer_lr
        )
        require_within(self, "outer_momentum", outer_momentum, "[0, 1)")
        members: Any = list(params)  # for two optimizers: an iterator would be empty for the second
        super().__init__(
            AdamW(members, lr=lr, betas=betas, eps=eps, weight_decay=weight_decay),
            exchange,
            SGD(members, lr=outer_lr, momentum=outer_momentum, nesterov=outer_momentum > 0),
            local_steps=local_steps,
            fragments=fragments,
        )


class SparseLoCo(LocalRounds):
    """Local AdamW, and sparse, quantized deltas with a residual that decays.

    SparseLoCo (Sarfi et al., 2025).  Every H steps, per rank:

    1. e = decay e + delta;
    2. send the top-k of every chunk of e, quantized;
    3. e = e - what was sent;
    4. x = x - outer_lr mean of what was sent.

    That is :class:`LocalRounds` with AdamW inside and the exchange
    ``Exchange(TopK(density=1 / 32, value_bits=2), memory=ErrorFeedback(decay=0.95))``.

    Differences to the published code: the mean is over all ranks, not over those that sent a
    coordinate; the learning rate is applied once; two bits are two bits on the wire.

    Args:
        params: the model's parameters, better named.
        exchange: with an ErrorFeedback that decays.
        lr, betas, eps, weight_decay: of the inner AdamW.
        local_steps: H.
        outer_lr: the server's learning rate.

    Raises:
        ValueError: if the exchange's memory is not an ErrorFeedback with ``decay`` below 1.

    Not supported: see :class:`LocalRounds`.

    Example::

        >>> from comm_hooks import ErrorFeedback, Exchange, TopK
        >>> from comm_hooks.optim import SparseLoCo
        >>> exchange = Exchange(TopK(density=1 / 32, value_bits=2), ErrorFeedback(decay=0.95))
        >>> rounds = SparseLoCo(model.named_parameters(), exchange, lr=1e-3, local_steps=15)
    """

    def __init__(
        self,
        params: ParamsT,
        exchange: Exchange,
        *,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.1,
        local_steps: int,
        outer_lr: float = 1.0,
    ) -> None:
        check_hyperparameters(
            self, betas=betas, lr=lr, eps=eps, weight_decay=weight_decay, outer_lr=outer_lr
        )
        require_kind(self, "exchange", exchange, Exchange)
        memory = exchange.memory
        if not isinstance(memory, ErrorFeedback) or memory.decay == 1:
            raise ValueError(
                f"SparseLoCo: the exchange's memory must be ErrorFeedback(decay=0.95) or another "
                f"decay below 1, got {memory!r}"
            )
        members: Any = list(params)  # for two optimizers: an iterator would be empty for the second
        super().__init__(
            AdamW(members, lr=lr, betas=betas, eps=eps, weight_decay=weight_decay),
            exchange,
            SGD(members, lr=outer_lr),
            local_steps=local_steps,
        )
