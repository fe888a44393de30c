"""SAFL: sketches of local progress, and an adaptive server."""

from typing import Any

from torch.optim import SGD
from torch.optim.optimizer import ParamsT

from comm_hooks.exchange import Exchange
from comm_hooks.optim.adam import Adam, AMSGrad
from comm_hooks.optim.hyperparameters import check_hyperparameters
from comm_hooks.optim.rounds.local_rounds import LocalRounds
from comm_hooks.optim.rounds.participation import ClientSampling
from comm_hooks.requirements import require_flag, require_kind


class SAFL(LocalRounds):
    """Sketched adaptive federated learning.

    SAFL (Algorithm 1).  Round t, with the same sketch R for all clients, fresh every round:

    1. each client takes K local SGD steps from x_t: x_{t,k} = x_{t,k-1} - local_lr g_{t,k-1};
    2. it sends sk(x_{t,0} - x_{t,K}) = R (x_{t,0} - x_{t,K});
    3. the sketches are averaged, on the wire;
    4. every rank applies u = desk(mean) = R^T mean to the same AMSGrad (or Adam) step with
       learning rate ``lr``, without bias correction: see :class:`~comm_hooks.optim.AMSGrad`.

    Differences to the listing: each parameter has a sketch of its own unless
    ``granularity="bucket"``; those that the exchange exempts, small or of one dimension, travel
    exactly (``min_numel=1, min_ndim=1`` exempts none).

    Args:
        params: the model's parameters, better named.
        exchange: with a sketch: :class:`~comm_hooks.CountSketch`, :class:`~comm_hooks.SRHT` or
            :class:`~comm_hooks.GaussianSketch`; ``granularity="bucket"`` sketches the whole model
            at once, as the paper does.
        lr: the server's learning rate (kappa).
        local_lr: the clients' (eta).  The adaptive server is blind to its scale: it matters
            for K > 1 only.
        local_steps: K >= 1.
        betas, eps, weight_decay: the server's.
        amsgrad: False for Adam on the server.
        participation: clients, if there are more than ranks.

    Raises:
        ValueError: if the exchange's compressor is not linear and unbiased: other compressors need
            error feedback, for which there are :class:`LocalRounds` and its other kinds.

    Not supported: see :class:`LocalRounds`.

    Example::

        >>> from comm_hooks import CountSketch, Exchange
        >>> from comm_hooks.optim import SAFL
        >>> exchange = Exchange(CountSketch(ratio=0.02), granularity="bucket")
        >>> safl = SAFL(model.named_parameters(), exchange, lr=1e-3, local_lr=0.1, local_steps=4)
    """

    def __init__(
        self,
        params: ParamsT,
        exchange: Exchange,
        *,
        lr: float = 1e-3,
        local_lr: float = 0.1,
        local_steps: int | None = None,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        amsgrad: bool = True,
        participation: ClientSampling | None = None,
    ) -> None:
        require_flag(self, "amsgrad", amsgrad)
        require_kind(self, "exchange", exchange, Exchange)
        check_hyperparameters(
            self, betas=betas, lr=lr, local_lr=local_lr, eps=eps, weight_decay=weight_decay
        )
        if not (exchange.compressor.linear and exchange.compressor.unbiased):
            raise ValueError(
                f"SAFL: {exchange.compressor} is no sketch: use CountSketch, SRHT or "
                "GaussianSketch (or LocalRounds, which takes any compressor)"
            )
        members: Any = list(params)  # for two optimizers: an iterator would be empty for the second
        inner = SGD(members, lr=local_lr)
        server = (AMSGrad if amsgrad else Adam)(
            members, lr=lr, betas=betas, eps=eps, weight_decay=weight_decay
        )
        super().__init__(
            inner, exchange, server, local_steps=local_steps, participation=participation
        )
