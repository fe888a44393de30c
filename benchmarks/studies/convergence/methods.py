"""The three papers' methods, ready to take steps."""

from dataclasses import dataclass
from typing import Any

from torch import nn

from benchmarks.studies.convergence.descent import Build, Stepping
from comm_hooks.collectives import Simulated
from comm_hooks.compressors import CountSketch, Identity
from comm_hooks.exchange import Exchange
from comm_hooks.optim import SAFL, FedLAMB
from comm_hooks.optim.private import DPMicroAdam
from comm_hooks.optim.rounds.participation import Participation

_ALL = 1.0  # of the clients take part

Parameters = list[tuple[str, nn.Parameter]]


@dataclass(frozen=True)
class Method:
    """Something to measure.

    Args:
        name: what it is called.
        clients: n.
        build: makes it.
        start: the first c tried.
    """

    name: str
    clients: int
    build: Build
    start: float


class OneClient:
    """An optimizer whose only client takes every step."""

    def __init__(self, optimizer: Any) -> None:
        self._optimizer = optimizer

    def clients(self) -> list[int]:
        """Return the one there is."""
        return [0]

    def step(self) -> None:
        """Take its step."""
        self._optimizer.step()


def _dp_micro_adam(**options: Any) -> Build:
    def build(parameters: Parameters, lr: float, seed: int) -> Stepping:
        return OneClient(DPMicroAdam(parameters, lr=lr, min_numel=1, **options))

    return build


def _safl(ratio: float) -> Build:
    def build(parameters: Parameters, lr: float, seed: int) -> Stepping:
        transport = Simulated(1)[0]
        exchange = Exchange(CountSketch(ratio), transport=transport, min_numel=1, seed=seed)
        return OneClient(SAFL(parameters, exchange, lr=lr, local_lr=1.0, local_steps=1))

    return build


def _fed_lamb(clients: int) -> Build:
    def build(parameters: Parameters, lr: float, seed: int) -> Stepping:
        return FedLAMB(
            parameters,
            Exchange(Identity(), transport=Simulated(1)[0]),
            lr=lr,
            local_steps=1,
            participation=Participation(clients, _ALL, seed=seed),
        )

    return build


def make_methods(clients: list[int]) -> list[Method]:
    """Return DP-MicroAdam in its two forms, SAFL, and FED-LAMB with each number of clients."""
    return [
        Method("DP-MicroAdam", 1, _dp_micro_adam(), 1.0),
        Method("DP-MicroAdam, published", 1, _dp_micro_adam(bias_correction="published"), 1.0),
        Method("SAFL", 1, _safl(0.25), 0.3),
        *(Method("FED-LAMB", n, _fed_lamb(n), 0.1) for n in clients),
    ]
