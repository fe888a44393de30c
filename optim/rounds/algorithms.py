"""Optimizers of local steps, such as FedAvg and DiLoCo, as presets of :class:`LocalRounds`.

Arguments and limits without a description are those of
:class:`~comm_hooks.optim.LocalRounds`: ``params`` are the model's parameters, better named,
``local_steps`` the steps of a round (K or H), ``participation`` the draw of clients, if there are
more clients than ranks.  The settings of a parameter group, such as ``lr``, are those of the inner
optimizer; in :class:`SAFL` they are those of the server optimizer.
"""

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn
from torch.optim import SGD, AdamW, Optimizer
from torch.optim.optimizer import ParamsT

from comm_hooks.exchange import Exchange
from comm_hooks.memory.error_feedback import ErrorFeedback
from comm_hooks.optim.adam import Adam, AMSGrad
from comm_hooks.optim.base import block
from comm_hooks.optim.hyperparameters import check_hyperparameters
from comm_hooks.optim.muon_adamw import MuonAdamW
from comm_hooks.optim.rounds.local_rounds import LocalRounds
from comm_hooks.optim.rounds.participation import ClientSampling
from comm_hooks.optim.rounds.shared_moments import LocalAMSGrad, LocalLAMB, check_clients
from comm_hooks.requirements import require_callable, require_flag


class FedAvg(LocalRounds):
    """Local SGD on every client, averaged every K steps: FedAvg, which FED-LAMB calls Fed-SGD.

    McMahan, Moore, Ramage, Hampson & Aguera y Arcas, AISTATS 2017, Algorithm 1, with equal weights:
    :class:`LocalRounds` with SGD inside and SGD of ``server_lr`` (1: the average) on the server.

    Args:
        exchange: any exchange; with ``Identity()`` this is FedAvg as published.
        lr: the clients' learning rate.
        momentum: the clients' momentum.
        weight_decay: the clients' weight decay, coupled (as in ``torch.optim.SGD``).
        server_lr, server_momentum: settings of the server optimizer; with momentum, FedAvgM.

    Example::

        >>> import torch
        >>> from comm_hooks import Exchange, Identity
        >>> from comm_hooks.optim import FedAvg, Participation
        >>> half = Participation(clients=10, fraction=0.5)
        >>> rounds = FedAvg(model.named_parameters(), Exchange(Identity()), participation=half)
        >>> for client in rounds.clients():
        ...     loss = model(torch.full((1, 8), float(client))).square().mean()
        ...     loss.backward()
        ...     rounds.step()
        ...     rounds.zero_grad()
    """

    published = block(compressor="identity")

    def __init__(
        self,
        params: ParamsT,
        exchange: Exchange,
        *,
        lr: float = 0.1,
        local_steps: int | None = None,
        momentum: float = 0.0,
        weight_decay: float = 0.0,
        server_lr: float = 1.0,
        server_momentum: float = 0.0,
        participation: ClientSampling | None = None,
    ) -> None:
        clients: Any = {"lr": lr, "momentum": momentum, "weight_decay": weight_decay}
        check_hyperparameters(self, **clients, server_lr=server_lr, server_momentum=server_momentum)
        inner = SGD(params, **clients)
        server = SGD(_groups_of(inner), lr=server_lr, momentum=server_momentum)
        super().__init__(
            inner, exchange, server, local_steps=local_steps, participation=participation
        )


class DiLoCo(LocalRounds):
    """Local steps of AdamW, and outer steps with Nesterov momentum.

    Douillard et al., "DiLoCo: Distributed Low-Communication Training of Language Models", 2023,
    Algorithm 1; with ``fragments`` > 1 Streaming DiLoCo (2025), without its overlap.
    :class:`LocalRounds` with AdamW as the inner and Nesterov's SGD as the server optimizer.

    Args:
        exchange: any exchange; with ``Identity()`` this is DiLoCo as published.
        lr, betas, eps, weight_decay: the settings of the inner AdamW.
        outer_lr, outer_momentum: settings of the server optimizer; 1 and 0: the plain average.

    Example::

        >>> from comm_hooks import Exchange, Quantize, ErrorFeedback
        >>> from comm_hooks.optim import DiLoCo
        >>> exchange = Exchange(Quantize(bits=4), memory=ErrorFeedback())
        >>> rounds = DiLoCo(model.named_parameters(), exchange, lr=1e-3, local_steps=100)
    """

    published = block(compressor="identity")

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
        settings: Any = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay}
        check_hyperparameters(self, **settings, outer_lr=outer_lr, outer_momentum=outer_momentum)
        inner = AdamW(params, **settings)
        server = _nesterov(_groups_of(inner), outer_lr, outer_momentum)
        super().__init__(inner, exchange, server, local_steps=local_steps, fragments=fragments)


class LocalAdamW(LocalRounds):
    """Local steps of AdamW, and the average of their displacements, with optional momentum.

    :class:`LocalRounds` with AdamW as the inner and SGD as the server optimizer.

    Args:
        exchange: any exchange.
        lr, betas, weight_decay: the settings of the inner AdamW.
        fragments: see :class:`LocalRounds`.
        outer_lr, outer_momentum: the settings of the server optimizer.

    Example::

        >>> from comm_hooks import ErrorFeedback, Exchange, TopK
        >>> from comm_hooks.optim.rounds.algorithms import LocalAdamW
        >>> exchange = Exchange(TopK(density=1 / 16, value_bits=1), ErrorFeedback())
        >>> rounds = LocalAdamW(model.named_parameters(), exchange, lr=1e-3, local_steps=8)
    """

    published = block(
        compressor="topk", density=1 / 16, value_bits=1, index_code="rice", exempt_bits=16
    )

    def __init__(
        self,
        params: ParamsT,
        exchange: Exchange,
        *,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.95),
        weight_decay: float = 0.1,
        local_steps: int = 8,
        fragments: int = 1,
        outer_lr: float = 1.0,
        outer_momentum: float = 0.0,
    ) -> None:
        settings: Any = {"lr": lr, "betas": betas, "weight_decay": weight_decay}
        check_hyperparameters(self, **settings, outer_lr=outer_lr, outer_momentum=outer_momentum)
        inner = AdamW(params, **settings, fused=True)
        server = SGD(_groups_of(inner), lr=outer_lr, momentum=outer_momentum)
        super().__init__(inner, exchange, server, local_steps=local_steps, fragments=fragments)


def _groups_of(optimizer: Optimizer) -> list[dict[str, Any]]:
    """Return the parameter groups without their settings, for the other of the two optimizers.

    Each setting of a group is an argument of one of them, not of both.
    """
    kept = ("params", "param_names")
    return [{key: g[key] for key in kept if key in g} for g in optimizer.param_groups]


def _nesterov(members: Any, lr: float, momentum: float) -> SGD:
    return SGD(members, lr=lr, momentum=momentum, nesterov=momentum > 0)


class MuLoCo(LocalRounds):
    """Local steps of Muon, displacements in two bits, decaying residuals, and outer momentum.

    MuLoCo (Therien et al., arXiv 2505.23725, 2025).  Every H = 30 steps, per rank, with the shared
    model x, delta = x - this rank's parameters, residual e, momentum u and mu = outer_momentum:

    1. e = decay e + delta;
    2. send Q(e), in two bits;
    3. e = e - Q(e);
    4. with D the mean of the messages, u = mu u + D and x = x - outer_lr (D + mu u).

    That is :class:`DiLoCo` with :class:`~comm_hooks.optim.MuonAdamW` inside and the exchange
    ``Exchange(TopK(density=1.0, value_bits=2), ErrorFeedback(decay=0.9))``: a sign and one bit
    of magnitude for every element.

    Differences to the published code: Muon's steps have the size of AdamW's, so that both share a
    learning rate; the two bits are those of :class:`~comm_hooks.TopK`.

    Args:
        exchange: any exchange.
        lr, betas, eps, momentum, weight_decay: settings of :class:`~comm_hooks.optim.MuonAdamW`.
        outer_lr, outer_momentum: the settings of the server optimizer.

    Raises:
        ValueError: for hyperparameters out of range; if no or all parameters are hidden matrices.

    Example::

        >>> from comm_hooks import ErrorFeedback, Exchange, TopK
        >>> from comm_hooks.optim import MuLoCo
        >>> exchange = Exchange(TopK(density=1.0, value_bits=2), ErrorFeedback(decay=0.9))
        >>> rounds = MuLoCo(model.named_parameters(), exchange, lr=1e-3, local_steps=30)
    """

    published = block(
        compressor="topk",
        density=1.0,
        value_bits=2,
        memory={"type": "error_feedback", "decay": 0.9},
    )

    def __init__(
        self,
        named_parameters: Iterable[tuple[str, nn.Parameter]],
        exchange: Exchange,
        *,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.95),
        eps: float = 1e-8,
        momentum: float = 0.95,
        weight_decay: float = 0.1,
        local_steps: int,
        outer_lr: float = 0.7,
        outer_momentum: float = 0.6,
    ) -> None:
        settings: Any = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay}
        settings["momentum"] = momentum
        check_hyperparameters(self, **settings, outer_lr=outer_lr, outer_momentum=outer_momentum)
        members = list(named_parameters)  # iterated over twice
        super().__init__(
            MuonAdamW(members, **settings),
            exchange,
            _nesterov(members, outer_lr, outer_momentum),
            local_steps=local_steps,
        )


class SparseLoCo(LocalRounds):
    """Local steps of AdamW, and sparse, quantized displacements with decaying residuals.

    SparseLoCo (Sarfi et al., 2025).  Every H steps, per rank, with x the shared model, delta = x -
    this rank's parameters, and the residual e:

    1. e = decay e + delta;
    2. send the top-k of every chunk of e, quantized;
    3. e = e - the message;
    4. x = x - outer_lr mean of the messages.

    That is :class:`LocalRounds` with AdamW as the inner optimizer and the exchange
    ``Exchange(TopK(density=1 / 32, value_bits=2), memory=ErrorFeedback(decay=0.95))``.

    Differences to the published code: the mean is over all ranks, not over those that sent a
    coordinate; the learning rate is applied once; payloads have two bits per value.

    Args:
        exchange: an exchange with an ErrorFeedback that decays.
        lr, betas, eps, weight_decay: the settings of the inner AdamW.
        outer_lr: the server optimizer's learning rate.

    Raises:
        ValueError: if ``exchange.memory`` is not an ErrorFeedback with ``decay`` below 1.

    Example::

        >>> from comm_hooks import ErrorFeedback, Exchange, TopK
        >>> from comm_hooks.optim import SparseLoCo
        >>> exchange = Exchange(TopK(density=1 / 32, value_bits=2), ErrorFeedback(decay=0.95))
        >>> rounds = SparseLoCo(model.named_parameters(), exchange, lr=1e-3, local_steps=15)
    """

    published = block(
        compressor="topk",
        density=1 / 32,
        value_bits=2,
        memory={"type": "error_feedback", "decay": 0.95},
        collective="all_gather",
    )
    needs = ("memory",)

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
        settings: Any = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay}
        check_hyperparameters(self, **settings, outer_lr=outer_lr)
        inner = AdamW(params, **settings)
        server = SGD(_groups_of(inner), lr=outer_lr)
        super().__init__(inner, exchange, server, local_steps=local_steps)
        memory = exchange.memory
        if not isinstance(memory, ErrorFeedback) or memory.decay == 1:
            raise ValueError(
                f"SparseLoCo: the exchange's memory must be ErrorFeedback(decay=0.95) or another "
                f"decay below 1, got {memory!r}"
            )


class FedAMS(LocalRounds):
    """Local steps of AMSGrad with a shared v_hat, averaged every K steps: FED-LAMB's Fed-AMS.

    Chen, Li & Li, FODS 2020.  (Another algorithm has the same name: Wang, Lin & Chen, ICML 2022,
    local SGD with AMSGrad on the server: ``LocalRounds(SGD(...), exchange, AMSGrad(...))``.)
    Round r over the clients that take part:

    1. client i starts at the shared model theta and v_hat and takes K steps of
       :class:`~comm_hooks.optim.rounds.shared_moments.LocalAMSGrad` to theta_i and v'_i;
    2. theta = mean theta_i, through the exchange; v_hat = max(v_hat, mean v'_i), exactly.

    As published, clients divide by the shared v_hat alone and correct no bias, so that v_hat is
    eps in the first round: tune lr for it, or choose a larger eps.  With
    ``bias_correction=True, bound="client"`` steps have the length of Adam's from the first on.

    Args:
        exchange: the exchange of displacements; v'_i is always sent as float32.
        lr, betas, eps, weight_decay, bias_correction, bound: the settings of the clients' AMSGrad.

    Example::

        >>> from comm_hooks import Exchange, Identity
        >>> from comm_hooks.optim import FedAMS
        >>> rounds = FedAMS(model.named_parameters(), Exchange(Identity()), local_steps=4)
    """

    published = block(compressor="identity")

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
        settings: Any = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay}
        settings |= {"bias_correction": bias_correction, "bound": bound}
        check_clients(self, **settings)
        inner = LocalAMSGrad(params, **settings)
        super().__init__(inner, exchange, local_steps=local_steps, participation=participation)


class FedLAMB(LocalRounds):
    """Local steps of LAMB with a shared v_hat, averaged every K steps: FED-LAMB.

    Karimi, Li & Li, UAI 2023, Algorithm 2.  As :class:`FedAMS`, with lengths of local steps that
    are set layer by layer:
    ``theta = theta - lr phi(|theta|) (p + lambda theta) / |p + lambda theta|``;
    see :class:`~comm_hooks.optim.rounds.shared_moments.LocalLAMB`.

    Differences to the paper's listing: the corrections of lines 9 and 11 do not overwrite m and
    v, which would grow without bound; the gradient of line 6 is taken anew in every local step; t
    counts the steps that a client has taken in all, since its moments last as long; a layer of norm
    zero moves.  As there, clients divide by the shared v_hat alone (line 12) and send v
    corrected; ``bound="client"`` lets a client's own v bound its steps too.  In the first round,
    where v_hat is still eps, the layers' lengths are set by phi all the same, but directions are
    those of SGD with momentum, and the weight decay is negligible.

    Args:
        params: the model's parameters, better named; each tensor is a layer.
        exchange: the exchange of displacements; v' is always sent as float32.
        lr, betas, eps, bound: the settings of the clients' optimizer.
        weight_decay: lambda; the paper tries 0, 0.01, 0.1.
        phi: a function from the norms of the layers to the lengths of their steps, both (layers,)
            and positive; by default the identity.  Theory wants it bounded, as is
            ``lambda n: n.clamp(0.01, 10)``.

    Raises:
        ValueError: if phi is not positive.

    Example::

        >>> from comm_hooks import Exchange, Identity
        >>> from comm_hooks.optim import FedLAMB
        >>> rounds = FedLAMB(model.named_parameters(), Exchange(Identity()), local_steps=4)
    """

    published = block(compressor="identity")

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
        settings: Any = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay}
        check_clients(self, bound=bound, **settings)
        if phi is not None:
            require_callable(self, "phi", phi)
        inner = LocalLAMB(params, phi=phi, bound=bound, **settings)
        super().__init__(inner, exchange, local_steps=local_steps, participation=participation)


class SAFL(LocalRounds):
    """Local SGD steps, sketches of their displacements, and an adaptive server optimizer: SAFL.

    SAFL (Algorithm 1).  Round t, with the same sketch R for all clients, fresh every round:

    1. each client takes K local SGD steps along gradients g from the shared model x_t:
       x_{t,k} = x_{t,k-1} - local_lr g_{t,k-1};
    2. it sends sk(x_{t,0} - x_{t,K}) = R (x_{t,0} - x_{t,K});
    3. the sketches are averaged, on the wire;
    4. every rank applies u = desk(mean) = R^T mean to the same AMSGrad (or Adam) step with
       learning rate ``lr``, without bias correction: see :class:`~comm_hooks.optim.AMSGrad`.

    Differences to the listing: parameters that the exchange exempts, small or of one dimension,
    travel exactly (``min_numel=1, min_ndim=1`` exempts none).

    Args:
        exchange: an exchange with :class:`~comm_hooks.CountSketch`, :class:`~comm_hooks.SRHT` or
            :class:`~comm_hooks.GaussianSketch`, which sketches the whole model at once, as in the
            paper (``granularity="parameter"``: each parameter by itself).
        lr: the server optimizer's learning rate (kappa).
        local_lr: the clients' learning rate (eta).  The server optimizer divides its scale out: it
            matters for K > 1 only.
        betas, eps, weight_decay: the settings of the server's optimizer.
        amsgrad: False for Adam on the server.

    Raises:
        ValueError: if the exchange's compressor is not linear and unbiased: other compressors need
            error feedback, as in :class:`LocalRounds`.

    Example::

        >>> from comm_hooks import CountSketch, Exchange
        >>> from comm_hooks.optim import SAFL
        >>> exchange = Exchange(CountSketch(ratio=0.02))
        >>> safl = SAFL(model.named_parameters(), exchange, lr=1e-3, local_lr=0.1, local_steps=4)
    """

    published = block(compressor="count_sketch")

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
        settings: Any = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay}
        check_hyperparameters(self, **settings, local_lr=local_lr)
        server = (AMSGrad if amsgrad else Adam)(params, **settings)
        inner = SGD(_groups_of(server), lr=local_lr)
        super().__init__(
            inner, exchange, server, local_steps=local_steps, participation=participation
        )
        if not (exchange.compressor.linear and exchange.compressor.unbiased):
            raise ValueError(
                f"SAFL: compressor {exchange.compressor} is no sketch: use CountSketch, SRHT or "
                "GaussianSketch (or LocalRounds, which takes any compressor)"
            )
