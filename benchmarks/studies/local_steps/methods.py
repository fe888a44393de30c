"""Local steps with compressed deltas, and the controls."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.optim import SGD, AdamW

from benchmarks.studies.runs import Advance, Method, Point, Settings
from benchmarks.studies.tasks import Task
from benchmarks.studies.training import Build, Client, NamedParameters, Plan, train
from comm_hooks.collectives import Transport
from comm_hooks.compressors import Identity, TopK
from comm_hooks.exchange import Exchange
from comm_hooks.memory import ErrorFeedback
from comm_hooks.optim.rounds.local_rounds import LocalRounds

ALL_REDUCE = "all_reduce"
ALONE = "no communication"

BETAS = (0.9, 0.95)
WEIGHT_DECAY = 0.1
VALUE_BITS = 1
EXEMPT_BITS = 16


@dataclass(frozen=True)
class Study:
    """What all methods share.

    Args:
        tasks: one per seed.
        plan: its rounds are steps.
        lr: of AdamW.
        server_lrs: tried for compressed deltas.  Where every coordinate comes from one client
            only, a mean is a fraction of what that client did.
        fragments: see :class:`~comm_hooks.optim.LocalRounds`; fewer where H is smaller.
    """

    tasks: Sequence[Task]
    plan: Plan
    lr: float
    server_lrs: Sequence[float]
    fragments: int


def make_methods(
    study: Study, *, local_steps: Sequence[int], densities: Sequence[float]
) -> list[Method]:
    """Return the controls, then for each H exact deltas and those of every density."""
    methods = [
        _method(study, ALL_REDUCE, {"H": 1, "density": None}, _all_reduce, [{}]),
        _method(study, ALONE, {"H": None, "density": None}, _alone, [{}]),
    ]
    for steps in local_steps:
        labels: dict[str, Any] = {"H": steps, "density": None}
        exact = _local(study, steps, None)
        methods.append(_method(study, "exact deltas", labels, exact, [{"server lr": 1.0}]))
        for density in densities:
            labels = {"H": steps, "density": density}
            variants = [{"server lr": rate} for rate in study.server_lrs]
            make = _local(study, steps, density)
            methods.append(_method(study, "top-k deltas", labels, make, variants))
    return methods


Make = Callable[[NamedParameters, Transport, Settings, int], Client]


def _method(
    study: Study,
    name: str,
    labels: dict[str, Any],
    make: Make,
    variants: Sequence[Settings],
) -> Method:
    def run(settings: Settings, seed: int, advance: Advance) -> list[Point]:
        def build(parameters: NamedParameters, transport: Transport) -> Client:
            return make(parameters, transport, settings, seed)

        builder: Build = build
        return train(study.tasks[seed], builder, study.plan, seed, advance)

    return Method(name, labels, run, study.lr, [{"lr": study.lr, **v} for v in variants])


def _adamw(parameters: NamedParameters, lr: float) -> AdamW:
    return AdamW(parameters, lr=lr, betas=BETAS, weight_decay=WEIGHT_DECAY)


class _Averaged:
    """AdamW on gradients that are averaged exactly, in every step."""

    def __init__(self, optimizer: AdamW, exchange: Exchange | None) -> None:
        self._optimizer = optimizer
        self._exchange = exchange

    def step(self, closure: Callable[[], float]) -> float:
        loss = closure()
        parameters = [p for group in self._optimizer.param_groups for p in group["params"]]
        if self._exchange is not None:
            gradients = {str(i): p.grad for i, p in enumerate(parameters) if p.grad is not None}
            self._exchange.average_(gradients, compress=False)
        self._optimizer.step()
        return loss


def _all_reduce(
    parameters: NamedParameters, transport: Transport, settings: Settings, seed: int
) -> Client:
    optimizer = _adamw(parameters, settings["lr"])
    exchange = Exchange(Identity(), transport=transport)
    return Client(_Averaged(optimizer, exchange), exchange, optimizer)


def _alone(
    parameters: NamedParameters, transport: Transport, settings: Settings, seed: int
) -> Client:
    optimizer = _adamw(parameters, settings["lr"])
    unused = Exchange(Identity(), transport=transport)
    return Client(_Averaged(optimizer, None), unused, optimizer, agrees=False)


def _local(study: Study, local_steps: int, density: float | None) -> Make:
    fragments = min(study.fragments, local_steps)

    def make(
        parameters: NamedParameters, transport: Transport, settings: Settings, seed: int
    ) -> Client:
        if density is None:
            exchange = Exchange(Identity(), seed=seed, transport=transport)
        else:
            exchange = Exchange(
                TopK(density, value_bits=VALUE_BITS),
                ErrorFeedback(),
                seed=seed,
                exempt_bits=EXEMPT_BITS,
                transport=transport,
            )
        inner = _adamw(parameters, settings["lr"])
        server = SGD([p for _, p in parameters], lr=settings["server lr"])
        rounds = LocalRounds(inner, exchange, server, local_steps=local_steps, fragments=fragments)
        return Client(rounds, exchange, inner)

    return make


def warm_up(steps: int, total: int) -> Callable[[float], float]:
    """Return the schedule that rises to 1 in so many steps of all."""
    return lambda progress: min(1.0, (progress * total + 1) / steps)


def numel(task: Task) -> int:
    """Return the number of parameters."""
    with torch.device("meta"):
        return sum(p.numel() for p in task.make_model().parameters())
