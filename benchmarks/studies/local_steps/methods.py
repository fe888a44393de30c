"""Local steps with compressed deltas, and the controls."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from torch.optim import SGD, AdamW

from comm_hooks.collectives import Transport
from comm_hooks.compressors import Identity, TopK
from comm_hooks.exchange import Exchange
from comm_hooks.launchers.lab.outcomes import Method, Settings
from comm_hooks.launchers.lab.simulated import (
    Client,
    Make,
    NamedParameters,
    Plan,
    simulated_method,
)
from comm_hooks.launchers.lab.tasks import Task
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
        _method(study, ALL_REDUCE, 1, None, [{}], _together),
        _method(study, ALONE, None, None, [{}], _alone),
    ]
    for steps in local_steps:
        exact = [{"server lr": 1.0}]
        methods.append(
            _method(study, "exact deltas", steps, None, exact, _local(study, steps, None))
        )
        for density in densities:
            variants = [{"server lr": rate} for rate in study.server_lrs]
            make = _local(study, steps, density)
            methods.append(_method(study, "top-k deltas", steps, density, variants, make))
    return methods


def _method(
    study: Study,
    name: str,
    steps: int | None,
    density: float | None,
    variants: Sequence[Settings],
    make: Make,
) -> Method:
    tried = [{"lr": study.lr, **variant} for variant in variants]
    labels = {"H": steps, "density": density}
    return simulated_method(name, labels, study.tasks, study.plan, make, study.lr, tried)


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


def _together(
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
    def make(
        parameters: NamedParameters, transport: Transport, settings: Settings, seed: int
    ) -> Client:
        exchange = Exchange(
            Identity() if density is None else TopK(density, value_bits=VALUE_BITS),
            None if density is None else ErrorFeedback(),
            seed=seed,
            exempt_bits=32 if density is None else EXEMPT_BITS,
            transport=transport,
        )
        inner = _adamw(parameters, settings["lr"])
        server = SGD([p for _, p in parameters], lr=settings["server lr"])
        fragments = min(study.fragments, local_steps)
        rounds = LocalRounds(inner, exchange, server, local_steps=local_steps, fragments=fragments)
        return Client(rounds, exchange, inner)

    return make


def warm_up(steps: int, total: int) -> Callable[[float], float]:
    """Return the schedule that rises to 1 in so many steps of all."""
    return lambda progress: min(1.0, (progress * total + 1) / steps)
