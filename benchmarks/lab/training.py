"""One rank of one method: the steps that it takes, and how its model is judged."""

import math
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from benchmarks.lab.outcomes import Advance, Diverged
from benchmarks.lab.runs import Point, Tuned
from benchmarks.lab.schedules import Schedule
from benchmarks.lab.tasks import Batch, Task
from comm_hooks.collectives import Transport
from comm_hooks.optim.rounds.local_rounds import LocalRounds

NamedParameters = list[tuple[str, nn.Parameter]]
Closure = Callable[[], Any]


class Steps(Protocol):
    """An optimizer that computes its gradients by a closure."""

    def step(self, closure: Closure) -> Any:
        """Take a step."""


class Counted(Protocol):
    """A counter of the bytes that a rank has sent, such as an exchange."""

    def stats(self) -> Mapping[str, Any]:
        """Return totals, ``bytes_sent`` among them."""


@dataclass(frozen=True)
class Client:
    """One rank's part of a method.

    Args:
        steps: takes the steps, and exchanges.
        traffic: counts the bytes.
        scheduled: the optimizer that follows the schedule of the learning rate.
        agrees: whether all ranks have the same model at each point of the curve. Otherwise the
            model of each rank is judged, and the mean is reported.
        rounds: of local steps, whose shared model is judged.
        finish: called after the last step, before the model is judged.
        model: under DDP, where a hook of DDP exchanges.
    """

    steps: Steps
    traffic: Counted
    scheduled: Optimizer
    agrees: bool = True
    rounds: LocalRounds | None = None
    finish: Callable[[], object] | None = None
    model: nn.Module | None = None


Build = Callable[[NamedParameters, Transport], Client]
Make = Callable[[NamedParameters, Transport, Tuned, int], Client]
"""The same with the tuned settings and a seed."""


class Meter(Protocol):
    """Measures the steps of a rank."""

    def begin(self) -> None:
        """A step begins."""

    def end(self, step: int, loss: Tensor) -> None:
        """A step has ended with this loss of the rank's batch."""

    def judged(self, point: Point) -> Point:
        """Return the point of the curve with what was measured."""


@dataclass(frozen=True)
class Plan:
    """The course of a run, the same for all methods.

    Args:
        rounds: how many there are.
        local_steps: a client's steps in each of them.
        batch: samples per step and client.
        points: how often the model is judged, evenly spread, the end included.
        schedule: of the learning rate, over the rounds.
        flat: train a :class:`~benchmarks.lab.simulated.FlatModel`.
        device: where.
        every: judge the model every so many rounds and at the end, in place of ``points``.
    """

    rounds: int
    local_steps: int
    batch: int
    points: int
    schedule: Schedule
    flat: bool = False
    device: str = "cpu"
    every: int | None = None

    def is_due(self, round_: int) -> bool:
        """Return whether the model is judged after this round, counted from 1."""
        if self.every is not None:
            return round_ % self.every == 0 or round_ == self.rounds
        return is_due(round_, self.rounds, self.points)


def is_due(step: int, steps: int, points: int) -> bool:
    """Return whether one of so many points, evenly spread, lies at this step, counted from 1.

    The last of them lies at the end.
    """
    return step * points // steps > (step - 1) * points // steps


@contextmanager
def known_warnings_ignored() -> Iterator[None]:
    """Ignore warnings about what the figures show: losses that are not finite, and no traffic."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*left out, having returned values")
        warnings.filterwarnings("ignore", message="world size is 1")
        yield


def new_model(task: Task, seed: int, device: str) -> nn.Module:
    """Return a model whose weights follow from the seed; torch's own generator stays as it is."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return task.make_model().to(device)


def batch_generator(seed: int, client: int, apart: int = 100_003) -> torch.Generator:
    """Return the generator of one client's batches; runs are ``apart`` in its seeds."""
    return torch.Generator().manual_seed(apart * seed + client)


def batches_of(task: Task, batch: int, seed: int) -> list[Iterator[Batch]]:
    """Return the batches of each client of a task, without end."""
    return [
        shard.batches(batch, batch_generator(seed, client, task.seeds_apart))
        for client, shard in enumerate(task.clients)
    ]


def judge(task: Task, model: nn.Module, round_: int, sent: int, curve: list[Point]) -> None:
    """Add a point to the curve.

    Raises:
        Diverged: with the points so far, if a loss is not finite.
    """
    figures = task.evaluate(model)
    if not all(map(math.isfinite, figures.values())):
        raise Diverged(*curve)
    curve.append(Point(round_, bytes_sent=sent, **figures))


def closure_of(
    loss_of: Callable[[nn.Module, Batch], Tensor], model: nn.Module | None, batch: Batch
) -> Closure:
    """Return the function that computes the gradients of a batch and returns its loss."""
    assert model is not None

    def closure() -> Tensor:
        model.zero_grad()
        loss = loss_of(model, batch)
        loss.backward()
        return loss.detach()  # a number would make the CPU wait

    return closure


def train_rank(
    task: Task,
    model: nn.Module,
    build: Build,
    plan: Plan,
    seed: int,
    advance: Advance,
    transport: Transport,
    meter: Meter | None = None,
) -> list[Point]:
    """Train one rank's replica of a model; return its curve if this rank judges the model.

    Args:
        task: what is learned; this rank trains on the samples of the client with its number.
        model: the replica.
        build: makes the rank's part of the method.
        plan: the course of the run.
        seed: of the batches.
        advance: called after each round, on rank 0.
        transport: joins the ranks.
        meter: measures each round.

    Raises:
        Diverged: with the points so far, as soon as a loss on held-out data is not finite.
    """
    client = build(list(model.named_parameters()), transport)
    model = client.model or model
    generator = batch_generator(seed, transport.rank, task.seeds_apart)
    batches = task.clients[transport.rank].batches(plan.batch, generator)
    groups = client.scheduled.param_groups
    rates = [group["lr"] for group in groups]
    speaks = transport.rank == 0
    curve: list[Point] = []
    for round_ in range(1, plan.rounds + 1):
        if meter:
            meter.begin()
        for group, rate in zip(groups, rates, strict=True):
            group["lr"] = rate * plan.schedule((round_ - 1) / plan.rounds)
        for _ in range(plan.local_steps):
            loss = client.steps.step(closure_of(task.loss, model, next(batches)))
        if meter:
            meter.end(round_, loss)
        if client.finish and round_ == plan.rounds:
            client.finish()
        if plan.is_due(round_) and (speaks or not client.agrees):
            sent = int(client.traffic.stats()["bytes_sent"])
            with client.rounds.server_parameters() if client.rounds else nullcontext():
                judge(task, model, round_, sent, curve)
            if meter:
                curve[-1] = meter.judged(curve[-1])
        if speaks:
            advance()
    return curve
