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
        local_steps: K.
    """

    name: str
    clients: int
    build: Build
    start: float
    local_steps: int = 1


class OneClient:
    """An optimizer whose only client takes every step, ``local_steps`` in a round."""

    def __init__(self, optimizer: Any, local_steps: int = 1) -> None:
        self._optimizer = optimizer
        self._local_steps = local_steps

    def clients(self) -> list[int]:
        """Return the one there is, once for each step of a round."""
        return [0] * self._local_steps

    def step(self) -> None:
        """Take its step."""
        self._optimizer.step()


def _dp_micro_adam(**options: Any) -> Build:
    def build(parameters: Parameters, lr: float, seed: int) -> Stepping:
        return OneClient(DPMicroAdam(parameters, lr=lr, min_numel=1, **options))

    return build


def _safl(ratio: float, local_steps: int) -> Build:
    def build(parameters: Parameters, lr: float, seed: int) -> Stepping:
        transport = Simulated(1)[0]
        exchange = Exchange(CountSketch(ratio), transport=transport, min_numel=1, seed=seed)
        # Remark 3.3: eta = 1 / (K sqrt(T)), up to a constant.
        safl = SAFL(parameters, exchange, lr=lr, local_lr=lr / local_steps, local_steps=local_steps)
        return OneClient(safl, local_steps)

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


def make_methods(clients: list[int], local_steps: list[int]) -> list[Method]:
    """Return DP-MicroAdam in its two forms, SAFL with each K, and FED-LAMB with each n."""
    return [
        Method("DP-MicroAdam", 1, _dp_micro_adam(), 1.0),
        Method("DP-MicroAdam, published", 1, _dp_micro_adam(bias_correction="published"), 1.0),
        *(Method("SAFL", 1, _safl(0.25, k), 0.3, k) for k in local_steps),
        *(Method("FED-LAMB", n, _fed_lamb(n), 0.1) for n in clients),
    ]
