"""FedAvg: local SGD, and the plain average."""

from typing import Any

from torch.optim import SGD
from torch.optim.optimizer import ParamsT

from comm_hooks.exchange import Exchange
from comm_hooks.optim.hyperparameters import check_hyperparameters
from comm_hooks.optim.rounds.local_rounds import LocalRounds
from comm_hooks.optim.rounds.participation import ClientSampling
from comm_hooks.requirements import require_within


class FedAvg(LocalRounds):
    """Local SGD on every client, averaged every K steps: FedAvg, which FED-LAMB calls Fed-SGD.

    McMahan, Moore, Ramage, Hampson & Aguera y Arcas, AISTATS 2017, Algorithm 1, with equal weights:
    :class:`LocalRounds` with SGD inside and SGD of ``server_lr`` (1: the average) as the server.

    Args:
        params: the model's parameters, better named.
        exchange: any; with ``Identity()`` this is FedAvg as published.
        lr: the clients' learning rate.
        local_steps: K.
        momentum: the clients'.
        weight_decay: the clients', coupled (as in ``torch.optim.SGD``).
        server_lr, server_momentum: the server's; with momentum this is FedAvgM.
        participation: clients, if there are more than ranks.

    Not supported: weights for clients of different size.

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
        check_hyperparameters(
            self, lr=lr, momentum=momentum, weight_decay=weight_decay, server_lr=server_lr
        )
        require_within(self, "server_momentum", server_momentum, "[0, 1)")
        members: Any = list(params)  # for two optimizers: an iterator would be empty for the second
        super().__init__(
            SGD(members, lr=lr, momentum=momentum, weight_decay=weight_decay),
            exchange,
            SGD(members, lr=server_lr, momentum=server_momentum),
            local_steps=local_steps,
            participation=participation,
        )
