"""Steps along signs; each rank sends the fast-moving part of its own momentum."""

from dataclasses import asdict, replace

import torch
from torch.optim.optimizer import ParamsT

from comm_hooks.compressors.base import Compressor
from comm_hooks.compressors.dct import DCTTopK
from comm_hooks.exchange import Exchange
from comm_hooks.memory.error_feedback import ErrorFeedback
from comm_hooks.optim.base import Tensors, block
from comm_hooks.optim.exchanging import ExchangingOptimizer
from comm_hooks.randomness import Draw


class DeMo(ExchangingOptimizer):
    r"""Decoupled momentum: each rank sends the largest part of its momentum and keeps the rest.

    DeMo (Peng, Quesnelle & Kingma, 2024, section 3).  A rank's momentum delta_i is the exchange's
    residual, with the momentum's decay.  Per step and parameter:

    1. each rank, with its gradient g_i: delta_i = decay delta_i + g_i;
    2. it sends q_i, the largest DCT coefficients of delta_i, and delta_i = delta_i - q_i
       (:class:`~comm_hooks.DCTTopK` and :class:`~comm_hooks.memory.ErrorFeedback`);
    3. theta = (1 - lr weight_decay) theta - lr sign(mean_i q_i), with sign(0) = 0.

    The mean of a coefficient is over the ranks that sent it, as in the authors' code.  With TopK,
    which has elements instead of coefficients, signs do not depend on that.

    Exempt parameters send all of delta_i, so that nothing stays in it: they take steps of
    lr sign(mean_i g_i).  The authors treat one-dimensional parameters like the others.

    Differences to the authors' code: lr is not a factor of g_i in step 1, so that a schedule of lr
    does not reweigh residuals; for the compressor's see :class:`~comm_hooks.DCTTopK`.

    Args:
        params, weight_decay: see :class:`~comm_hooks.optim.exchanging.ExchangingOptimizer`.
        exchange: an exchange with DCTTopK (or TopK) and ErrorFeedback(decay=0.999), as published.
        lr: learning rate, of the size of AdamW's, since steps are signs.

    State: none in the optimizer; the exchange holds the momenta.

    Example::

        >>> from comm_hooks import skip_hook
        >>> from comm_hooks.compressors.dct import DCTTopK
        >>> ddp_model.register_comm_hook(None, skip_hook)
        >>> exchange = Exchange(DCTTopK(chunk=64, density=1 / 128), ErrorFeedback(decay=0.999))
        >>> optimizer = DeMo(ddp_model.named_parameters(), exchange, lr=1e-3)
    """

    published = block(
        compressor="dct_topk",
        chunk=64,
        density=1 / 128,
        memory={"type": "error_feedback", "decay": 0.999},
        collective="all_gather",
    )
    needs = ("memory",)

    def __init__(
        self, params: ParamsT, exchange: Exchange, *, lr: float = 1e-3, weight_decay: float = 0.0
    ) -> None:
        super().__init__(params, exchange, {"lr": lr, "weight_decay": weight_decay})
        if not isinstance(exchange.memory, ErrorFeedback):
            raise ValueError(
                "DeMo: the momentum is the exchange's residual; give it memory="
                f"ErrorFeedback(decay=0.999), not {exchange.memory}"
            )
        self._compress: bool | Compressor = True
        if isinstance(exchange.compressor, DCTTopK):
            self._compress = _MeanOfSenders(**asdict(exchange.compressor))

    def _step(self, gradients: Tensors) -> None:
        if not self._average(self._named(gradients), compress=self._compress):
            return
        torch._foreach_sign_(gradients)
        self._descend(gradients)


class _MeanOfSenders(DCTTopK):
    """DCTTopK with a sum that is, by coefficient, N times the mean over the ranks that sent it.

    N is the number of ranks.  Only for signs of a mean: a hook needs the mean over all ranks.
    """

    def decode_sum(
        self, out: torch.Tensor, payloads: torch.Tensor, draw: Draw, *, alpha: float = 1.0
    ) -> None:
        first, *others = (
            self.coefficients(octets, out.shape[1], replace(draw, rank=rank))
            for rank, octets in enumerate(payloads)
        )
        total, senders = first.clone(), (first != 0).float()
        for coefficients in others:
            total += coefficients
            senders += coefficients != 0
        total.div_(senders.clamp_(min=1))
        self.write_vectors(out, total, alpha * len(payloads), add=False)
