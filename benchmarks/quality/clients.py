"""One rank's part of a method: the optimizer, its exchange, and gradients that are clipped."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import nn
from torch.optim import Optimizer

from benchmarks.lab.crossings import Traffic
from benchmarks.lab.methods import Method
from benchmarks.lab.optimizers import Trainer
from benchmarks.lab.runs import Settings
from benchmarks.lab.simulated import Client, NamedParameters
from comm_hooks.collectives import Transport
from comm_hooks.exchange import Exchange
from comm_hooks.optim.rounds.local_rounds import LocalRounds

CLIP_NORM = 1.0
"""Of gradients: of the mean where gradients are averaged, else of each rank's own."""

Closure = Callable[[], float]


@dataclass
class Averaged:
    """An optimizer on gradients that are averaged in every step; not at all without an exchange."""

    optimizer: Optimizer
    exchange: Exchange | None
    parameters: list[nn.Parameter]
    compress: bool

    def step(self, closure: Closure) -> float:
        """Compute gradients, average and clip them, and take the step."""
        loss = closure()
        if self.exchange is not None:
            gradients = {
                str(i): p.grad for i, p in enumerate(self.parameters) if p.grad is not None
            }
            self.exchange.average_(gradients, compress=self.compress)
        nn.utils.clip_grad_norm_(self.parameters, CLIP_NORM)
        self.optimizer.step()
        return loss


@dataclass
class Own:
    """An optimizer that takes gradients as they are, but for clipping."""

    optimizer: Any
    parameters: list[nn.Parameter]

    def step(self, closure: Closure) -> float:
        """Compute gradients, clip them, and take the step."""
        loss = closure()
        nn.utils.clip_grad_norm_(self.parameters, CLIP_NORM)
        self.optimizer.step()
        return loss


@dataclass
class Hooked(Own):
    """An optimizer on gradients that a hook of DDP has averaged when they are there."""

    traffic: Traffic
    taken: int = 0

    def step(self, closure: Closure) -> float:
        """Count the step, and take it."""
        self.taken += 1
        return super().step(closure)

    def stats(self) -> dict[str, int]:
        """Return what this rank has sent and received."""
        sent, received = self.traffic(self.taken)
        return {"bytes_sent": sent, "bytes_received": received}


def make_hooked_client(trainer: Trainer) -> Client:
    """Return a rank's part of a method whose gradients cross in a hook of DDP."""
    steps = Hooked(trainer.optimizer, list(trainer.ddp.parameters()), trainer.traffic)
    return Client(steps, steps, trainer.scheduled)


def make_client(
    method: Method,
    named: NamedParameters,
    transport: Transport,
    settings: Settings,
) -> Client:
    """Return a rank's part of a method of ``python -m benchmarks.compare``, on any transport."""
    optimizer, exchange = method.attach(named, settings, transport)
    parameters = [p for _, p in named]
    if method.exchanges_itself:
        rounds = optimizer if isinstance(optimizer, LocalRounds) else None
        return Client(Own(optimizer, parameters), exchange, optimizer, rounds=rounds)
    alone = method.crossing == "none"
    used = None if alone else exchange
    steps = Averaged(optimizer, used, parameters, compress=method.crossing != "all_reduce")
    return Client(steps, exchange, optimizer, agrees=not alone)
