"""FED-LAMB and Fed-AMS: local adaptive steps with a shared bound on the second moment."""

from collections.abc import Callable

import torch
from torch.optim.optimizer import ParamsT

from comm_hooks.exchange import Exchange
from comm_hooks.optim.rounds.local_rounds import LocalRounds
from comm_hooks.optim.rounds.participation import ClientSampling
from comm_hooks.optim.rounds.shared_moments import LocalAMSGrad, LocalLAMB, check_clients
from comm_hooks.requirements import require_callable


class FedAMS(LocalRounds):
    """Local AMSGrad with a shared v_hat, averaged every K steps: what FED-LAMB calls Fed-AMS.

    Chen, Li & Li, FODS 2020.  (Another algorithm has the same name: Wang, Lin & Chen, ICML 2022,
    local SGD with AMSGrad on the server: ``LocalRounds(SGD(...), exchange, AMSGrad(...))``.)
    Round r over the clients that take part:

    1. each starts at the server's theta and v_hat and takes K steps of
       :class:`~comm_hooks.optim.rounds.shared_moments.LocalAMSGrad`;
    2. theta = mean theta_i, through the exchange; v_hat = max(v_hat, mean v'_i), exactly.

    As published, clients divide by the server's v_hat alone and correct no bias, so that the first
    round has nothing but eps to divide by: tune lr for it, or choose a larger eps.  With
    ``bias_correction=True, bound="client"`` steps have the length of Adam's from the first on.

    Args:
        params: the model's parameters, better named.
        exchange: for the deltas; v always travels as float32.
        lr, betas, eps, weight_decay, bias_correction, bound: the clients'.
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
        bias_correction: bool = False,
        bound: str = "server",
        local_steps: int | None = None,
        participation: ClientSampling | None = None,
    ) -> None:
        check_clients(
            self,
            betas=betas,
            lr=lr,
            eps=eps,
            weight_decay=weight_decay,
            bias_correction=bias_correction,
            bound=bound,
        )
        inner = LocalAMSGrad(
            params,
            lr=lr,
            betas=betas,
            eps=eps,
            weight_decay=weight_decay,
            bias_correction=bias_correction,
            bound=bound,
        )
        super().__init__(inner, exchange, local_steps=local_steps, participation=participation)


class FedLAMB(LocalRounds):
    """Layerwise and dimensionwise local adaptive steps: FED-LAMB.

    Karimi, Li & Li, UAI 2023, Algorithm 2.  As :class:`FedAMS`, with local steps whose length is
    set layer by layer: ``theta = theta - lr phi(|theta|) (p + lambda theta) / |p + lambda theta|``;
    see :class:`~comm_hooks.optim.rounds.shared_moments.LocalLAMB`.

    Differences to the paper's listing: what lines 9 and 11 correct does not overwrite m and v,
    which would grow without bound; the gradient of line 6 is taken anew in every local step; t
    counts the steps that a client has taken in all, since its moments last as long; a layer of norm
    zero moves.  As there, clients divide by the server's v_hat alone (line 12) and send v
    corrected; ``bound="client"`` lets a client's own v bound its steps too.  In the first round,
    where v_hat is still eps, the layers' lengths are set by phi all the same, but directions are
    those of SGD with momentum, and beside them the weight decay vanishes.

    Args:
        params: the model's parameters, better named; each tensor is a layer.
        exchange: for the deltas; v always travels as float32.
        lr, betas, eps, bound: the clients'.
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
        bound: str = "server",
        local_steps: int | None = None,
        participation: ClientSampling | None = None,
    ) -> None:
        check_clients(self, betas=betas, lr=lr, eps=eps, weight_decay=weight_decay, bound=bound)
        if phi is not None:
            require_callable(self, "phi", phi)
        inner = LocalLAMB(
            params,
            lr=lr,
            betas=betas,
            eps=eps,
            weight_decay=weight_decay,
            phi=phi,
            bound=bound,
        )
        super().__init__(inner, exchange, local_steps=local_steps, participation=participation)
