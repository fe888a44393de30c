"""Training by N simulated ranks, each with data and a residual of its own."""

import math
import time
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call, grad, vmap

from benchmarks.lab.outcomes import Advance
from benchmarks.lab.schedules import cosine
from benchmarks.lab.simulated import FlatModel
from benchmarks.lab.tasks import Task, build_task
from benchmarks.lab.training import batches_of, known_warnings_ignored, new_model
from benchmarks.studies.scale.methods import Method
from comm_hooks.collectives import Simulated

_JUDGED_AT_ONCE = 64  # models


@dataclass(frozen=True)
class Setup:
    """How every run goes.

    Args:
        steps: how many there are.
        batch: samples per step of all ranks together, so that exact averaging learns alike
            whatever the number of ranks.
        momentum: of SGD; its learning rate falls along half a cosine.
        task: what is learnt; its training data is divided over the ranks.
    """

    steps: int
    batch: int
    momentum: float = 0.9
    task: str = "digits"


@dataclass(frozen=True)
class Trained:
    """What became of one run.

    Attributes:
        error: share of held-out predictions that are wrong at the end, the mean over ranks.
        loss: cross-entropy there, in nats; None if the run diverged.
        bytes_sent, bytes_received: by one rank in one step.
        seconds: that the run took.
    """

    method: str
    ranks: int
    seed: int
    lr: float
    error: float
    loss: float | None
    bytes_sent: int
    bytes_received: int
    seconds: float


def train(
    setup: Setup, method: Method, ranks: int, *, seed: int, lr: float, advance: Advance
) -> Trained:
    """Train with that many ranks; return what became of it.

    1. every rank computes the gradient of ``setup.batch / ranks`` of its own samples, all ranks at
       once (``torch.func.vmap``);
    2. the ranks' exchanges run in lockstep in a :class:`~comm_hooks.collectives.Simulated` world,
       the whole model being one vector;
    3. all take the same step of SGD with momentum on the mean.

    Without communication each rank steps on its own gradient, and the mean over ranks of what
    their models are worth is reported.
    """
    started = time.monotonic()
    task = build_task(setup.task, clients=ranks, seed=seed)
    clients = batches_of(task, setup.batch // ranks, seed)
    model = new_model(task, seed, "cpu")
    world = _World(model, method, ranks, seed)
    momentum = torch.zeros_like(world.parameters)
    for step in range(setup.steps):
        batches = [next(client) for client in clients]
        inputs, targets = (torch.stack(parts) for parts in zip(*batches, strict=True))
        gradients = world.gradients(inputs, targets)
        step_direction = world.exchange(gradients)
        momentum.mul_(setup.momentum).add_(step_direction)
        world.parameters.sub_(momentum, alpha=lr * cosine(step / setup.steps))
        advance()
    loss, error = world.judge(task)
    finite = math.isfinite(loss)
    sent, received = world.traffic()
    return Trained(
        method=method.name,
        ranks=ranks,
        seed=seed,
        lr=lr,
        error=error if finite else 1.0,
        loss=loss if finite else None,
        bytes_sent=sent // setup.steps,
        bytes_received=received // setup.steps,
        seconds=round(time.monotonic() - started, 2),
    )


class _World:
    """N ranks' parameters: one flat vector where they exchange, else one for each of them."""

    def __init__(self, model: nn.Module, method: Method, ranks: int, seed: int) -> None:
        self._model = FlatModel(model)
        initial = self._model.flat.detach()[0]
        self._world = Simulated(ranks, decode_once=True)
        self._exchanges = [
            method.exchange(transport, seed) for transport in self._world if method.exchanges
        ]
        self.parameters = initial if method.exchanges else initial.repeat(ranks, 1)

    def gradients(self, inputs: Tensor, targets: Tensor) -> Tensor:
        """Return every rank's gradient, (N, d), of its batch: (N, samples, ...) each."""
        of_ranks = vmap(grad(self._loss), in_dims=(None if self._exchanges else 0, 0, 0))
        gradients: Tensor = of_ranks(self.parameters, inputs, targets)
        return gradients

    def exchange(self, gradients: Tensor) -> Tensor:
        """Return what parameters of this world's shape are to follow.  May overwrite its input."""
        if not self._exchanges:
            return gradients
        # A parameter of one dimension would not be compressed.
        rounds = [
            exchange.round({"model": gradient[None]})
            for exchange, gradient in zip(self._exchanges, gradients, strict=True)
        ]
        with known_warnings_ignored():
            self._world.run(rounds)
        return gradients[0]

    def traffic(self) -> tuple[int, int]:
        """Return the bytes that one rank has sent, and received."""
        if not self._exchanges:
            return 0, 0
        stats = self._exchanges[0].stats()
        return int(stats["bytes_sent"]), int(stats["bytes_received"])

    def judge(self, task: Task) -> tuple[float, float]:
        """Return the loss and the share of errors on held-out data, means over ranks."""
        models = self.parameters[None] if self._exchanges else self.parameters
        inputs, targets = next(task.held_out.in_order(len(task.held_out)))
        losses, errors = [], []
        for some in models.split(_JUDGED_AT_ONCE):
            logits = vmap(self._logits, in_dims=(0, None))(some, inputs)
            everywhere = targets.expand(len(some), -1)
            losses.append(F.cross_entropy(logits.flatten(0, 1), everywhere.flatten()) * len(some))
            errors.append((logits.argmax(2) != everywhere).float().mean(1).sum())
        count = len(models)
        return float(torch.stack(losses).sum() / count), float(torch.stack(errors).sum() / count)

    def _logits(self, flat: Tensor, inputs: Tensor) -> Tensor:
        logits: Tensor = functional_call(self._model, {"flat": flat[None]}, (inputs,))
        return logits

    def _loss(self, flat: Tensor, inputs: Tensor, targets: Tensor) -> Tensor:
        return F.cross_entropy(self._logits(flat, inputs), targets)
