"""FED-LAMB and Fed-AMS: local adaptive steps with a shared bound on the second moment."""

from collections.abc import Callable

import torch
from torch.optim.optimizer import ParamsT

from comm_hooks.exchange import Exchange
from comm_hooks.optim.rounds.local_rounds import LocalRounds
from comm_hooks.optim.rounds.participation import ClientSampling
from comm_hooks.optim.rounds.shared_moments import LocalAMSGrad, LocalLAMB


class FedAMS(LocalRounds):
    """Local AMSGrad with a shared v_hat, averaged every K steps: what FED-LAMB calls Fed-AMS.

    Chen, Li & Li, FODS 2020.  (Another algorithm has the same name: Wang, Lin & Chen, ICML 2022,
    local SGD with AMSGrad on the server: ``LocalRounds(SGD(...), exchange, AMSGrad(...))``.)
    Round r over the clients that take part:

    1. each starts at the server's theta and v_hat and takes K steps of
       :class:`~comm_hooks.optim.rounds.shared_moments.LocalAMSGrad`;
    2. theta = mean theta_i, through the exchange; v_hat = max(v_hat, mean v_i), exactly.

    Args:
        params: the model's parameters, better named.
        exchange: for the deltas; v always travels as float32.
        lr, betas, eps, weight_decay: the clients'.
        local_steps: K.
        participation: clients, if there are more than ranks.

    Not supported: see :class:`LocalRounds`.

    Example::

        >>> from comm_hooks import Exchange, Identity
        >>> from comm_hooks.optim import FedAMS
        >>> rounds = FedAMS(model.named_parameters(), Exchange(Identity()), local_steps=4)
    """

    def __init__(
        self,
        params: ParamsT,
        exchange: Exchange,
        *,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        local_steps: int | None = None,
        participation: ClientSampling | None = None,
    ) -> None:
        inner = LocalAMSGrad(params, lr=lr, betas=betas, eps=eps, weight_decay=weight_decay)
        super().__init__(inner, exchange, local_steps=local_steps, participation=participation)


class FedLAMB(LocalRounds):
    """Layerwise and dimensionwise local adaptive steps: FED-LAMB.

    Karimi, Li & Li, UAI 2023, Algorithm 2.  As :class:`FedAMS`, with local steps whose length is
    set layer by layer: ``theta = theta - lr phi(|theta|) (p + lambda theta) / |p + lambda theta|``;
    see :class:`~comm_hooks.optim.rounds.shared_moments.LocalLAMB`.

    Differences to the paper's listing: m_hat does not overwrite m; beta1^t counts the steps that a
    client has taken in all, since its m lasts as long; a layer of norm zero moves.

    Args:
        params: the model's parameters, better named; each tensor is a layer.
        exchange: for the deltas; v always travels as float32.
        lr, betas, eps: the clients'.
        weight_decay: lambda; the paper tries 0, 0.01, 0.1.
        phi: scale of a layer's step by its norm, stacked (layers,) -> (layers,), positive; the
            identity by default.  The theory wants it bounded: ``lambda n: n.clamp(0.01, 10)``.
        local_steps: K.
        participation: clients, if there are more than ranks.

    Raises:
        ValueError: if phi is not positive.

    Not supported: see :class:`LocalRounds`.

    Example::

        >>> from comm_hooks import Exchange, Identity
        >>> from comm_hooks.optim import FedLAMB
        >>> rounds = FedLAMB(model.named_parameters(), Exchange(Identity()), local_steps=4)
    """

    def __init__(
        self,
        params: ParamsT,
        exchange: Exchange,
        *,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        phi: Callable[[torch.Tensor], torch.Tensor] | None = None,
        local_steps: int | None = None,
        participation: ClientSampling | None = None,
    ) -> None:
        inner = LocalLAMB(params, lr=lr, betas=betas, eps=eps, weight_decay=weight_decay, phi=phi)
        super().__init__(inner, exchange, local_steps=local_steps, participation=participation)
