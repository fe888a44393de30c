"""The three papers' methods, ready to take steps."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from torch import nn

from benchmarks.lab.outcomes import Advance, Method
from benchmarks.lab.runs import Point, Tuned
from benchmarks.lab.training import known_warnings_ignored
from benchmarks.studies.convergence.descent import Build, Problem, Stepping, squared_gradients
from comm_hooks.collectives import Simulated
from comm_hooks.compressors import CountSketch, Identity
from comm_hooks.exchange import Exchange
from comm_hooks.optim import SAFL, FedLAMB
from comm_hooks.optim.private import DPMicroAdam
from comm_hooks.optim.rounds.participation import Participation

_ALL = 1.0  # of the clients take part

Parameters = list[tuple[str, nn.Parameter]]


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


def dp_micro_adam(**options: Any) -> Build:
    """Return what makes DP-MicroAdam."""

    def build(parameters: Parameters, lr: float, seed: int) -> Stepping:
        return OneClient(DPMicroAdam(parameters, lr=lr, min_numel=1, **options))

    return build


def make_safl(ratio: float, local_steps: int) -> Build:
    """Return what makes SAFL with a Count-Sketch of that ratio."""

    def build(parameters: Parameters, lr: float, seed: int) -> Stepping:
        transport = Simulated(1)[0]
        exchange = Exchange(CountSketch(ratio), transport=transport, min_numel=1, seed=seed)
        # Remark 3.3: eta = 1 / (K sqrt(T)), up to a constant.
        safl = SAFL(parameters, exchange, lr=lr, local_lr=lr / local_steps, local_steps=local_steps)
        return OneClient(safl, local_steps)

    return build


def fed_lamb(clients: int) -> Build:
    """Return what makes FED-LAMB with that many clients."""

    def build(parameters: Parameters, lr: float, seed: int) -> Stepping:
        return FedLAMB(
            parameters,
            Exchange(Identity(), transport=Simulated(1)[0]),
            lr=lr,
            local_steps=1,
            participation=Participation(clients, _ALL, seed=seed),
        )

    return build


def make_methods(
    problem: Problem, lengths: Sequence[int], clients: Sequence[int], local_steps: Sequence[int]
) -> list[Method]:
    """Return DP-MicroAdam in its two forms, SAFL with each K, and FED-LAMB with each n.

    The tuned learning rate is the constant c; a point of a curve is a training of T rounds.

    Args:
        problem: the loss and its noise.
        lengths: T, in increasing order; c is tuned on the middle one.
        clients: n.
        local_steps: K.
    """

    def method(name: str, build: Build, start: float, clients: int = 1, steps: int = 1) -> Method:
        def train(settings: Tuned, seed: int, advance: Advance) -> list[Point]:
            with known_warnings_ignored():
                curve = [
                    squared_gradients(
                        problem, build, scale=settings["lr"], steps=t, seed=seed, advance=advance
                    )
                    for t in lengths
                ]
            return [*curve[:-1], replace(curve[-1], validation=curve[len(curve) // 2].loss)]

        return Method(name, {"clients": clients, "K": steps}, train, start)

    published = dp_micro_adam(bias_correction="published")
    return [
        method("DP-MicroAdam", dp_micro_adam(), 1.0),
        method("DP-MicroAdam, published", published, 1.0),
        *(method("SAFL", make_safl(0.25, k), 0.3, steps=k) for k in local_steps),
        *(method("FED-LAMB", fed_lamb(n), 0.1, n) for n in clients),
    ]
