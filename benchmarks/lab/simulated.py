"""A training run of several clients in one process: a rank each, or one rank for all in turn."""

import copy
import math
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import nn
from torch.optim import Optimizer

from benchmarks.lab.model import count
from benchmarks.lab.outcomes import (
    Advance,
    Diverged,
    Method,
    Point,
    Settings,
    mean_point,
)
from benchmarks.lab.schedules import Schedule
from benchmarks.lab.tasks import Batch, Task
from comm_hooks.collectives import Transport, run_ranks
from comm_hooks.optim.rounds.local_rounds import LocalRounds

NamedParameters = list[tuple[str, nn.Parameter]]


class Steps(Protocol):
    """What takes a client's steps."""

    def step(self, closure: Callable[[], float]) -> float:
        """Take one, with the gradients that the closure computes."""


class Counted(Protocol):
    """What counts the bytes that a rank has sent, such as an exchange."""

    def stats(self) -> Mapping[str, Any]:
        """Return totals, ``bytes_sent`` among them."""


@dataclass(frozen=True)
class Client:
    """One rank's part of a method.

    Args:
        steps: takes the steps and exchanges what is to be exchanged.
        traffic: what counts it.
        scheduled: whose learning rates follow the schedule.
        agrees: whether all ranks have the same model when it is judged.  Otherwise each rank's is
            judged, and the mean is reported.
        rounds: of local steps, if it takes such: their server's model is judged.
    """

    steps: Steps
    traffic: Counted
    scheduled: Optimizer
    agrees: bool = True
    rounds: LocalRounds | None = None


Build = Callable[[NamedParameters, Transport], Client]
Make = Callable[[NamedParameters, Transport, Settings, int], Client]
"""The same, given what is tuned and a seed, too."""


@dataclass(frozen=True)
class Plan:
    """How a run goes, the same for all methods.

    Args:
        rounds: how many there are.
        local_steps: a client's steps in each of them.
        batch: samples per step and client.
        points: how often the model is judged, evenly spread, the end included.
        schedule: of the learning rate, over the rounds.
        flat: train a :class:`FlatModel`.
        device: where.
    """

    rounds: int
    local_steps: int
    batch: int
    points: int
    schedule: Schedule
    flat: bool = False
    device: str = "cpu"

    def is_due(self, round_: int) -> bool:
        """Return whether the model is judged after this round, counted from 1."""
        return is_due(round_, self.rounds, self.points)


def is_due(step: int, steps: int, points: int) -> bool:
    """Return whether one of so many points, evenly spread, lies at this step, counted from 1.

    The last of them lies at the end.
    """
    return step * points // steps > (step - 1) * points // steps


class FlatModel(nn.Module):
    """A module whose parameters are all in one, of shape (1, d), in the order of their names.

    So that a compressor gets the whole model as one vector, as papers write it.  An exchange on the
    module itself would send norms and biases exactly: half a percent of the elements, and so more
    bytes than a sketch of 1/1000 has, for the parameters that matter most.

    Args:
        module: whose parameters are copied.  Buffers remain its own.

    Example::

        >>> flat = FlatModel(nn.Linear(3, 2))
        >>> [tuple(p.shape) for p in flat.parameters()], flat(torch.ones(5, 3)).shape
        ([(1, 8)], torch.Size([5, 2]))
    """

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        named = dict(module.named_parameters())
        # In a tuple, where nn.Module does not look for parameters.
        self._hidden = (module,)
        self._shapes = {name: p.shape for name, p in named.items()}
        self.flat = nn.Parameter(torch.cat([p.detach().flatten() for p in named.values()])[None])

    def forward(self, *inputs: Any) -> Any:
        """Apply the module with parameters that are views of the flat one."""
        pieces = self.flat[0].split([shape.numel() for shape in self._shapes.values()])
        named = {
            name: piece.view(shape)
            for (name, shape), piece in zip(self._shapes.items(), pieces, strict=True)
        }
        return torch.func.functional_call(self._hidden[0], named, inputs)

    def train(self, mode: bool = True) -> "FlatModel":
        """Set the mode of the module, too."""
        self._hidden[0].train(mode)
        super().train(mode)
        return self


def train(task: Task, build: Build, plan: Plan, seed: int, advance: Advance) -> list[Point]:
    """Train a new model; return its curve.

    Args:
        task: whose clients the ranks are.
        build: makes a rank's part of the method.
        plan: how it goes.
        seed: of weights and batches.
        advance: called after each round.

    Raises:
        Diverged: with the points so far, as soon as a loss on held-out data is not finite.
    """
    model = new_model(task, seed, plan.device)
    if plan.flat:
        model = FlatModel(model)

    def rank(transport: Transport) -> list[Point]:
        return train_rank(task, copy.deepcopy(model), build, plan, seed, advance, transport)

    with known_warnings_ignored():
        return mean_curve(run_ranks(rank, len(task.clients)))


def mean_curve(curves: Sequence[list[Point]]) -> list[Point]:
    """Return the mean over the ranks that judged their model."""
    return [mean_point(points) for points in zip(*filter(None, curves), strict=True)]


@contextmanager
def known_warnings_ignored() -> Iterator[None]:
    """Ignore warnings of what shows in the figures: losses that are not finite, and no traffic."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*left out, having returned values")
        warnings.filterwarnings("ignore", message="world size is 1")
        yield


def new_model(task: Task, seed: int, device: str) -> nn.Module:
    """Return a model whose weights follow from the seed; torch's own generator stays as it is."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return task.make_model().to(device)


def numel(task: Task) -> int:
    """Return the number of parameters of a task's model, without making it."""
    return count(task.make_model)


def batch_generator(seed: int, client: int) -> torch.Generator:
    """Return the generator that one client's batches follow from."""
    return torch.Generator().manual_seed(100_003 * seed + client)


def judge(task: Task, model: nn.Module, round_: int, sent: int, curve: list[Point]) -> None:
    """Add a point to the curve.

    Raises:
        Diverged: with the points so far, if a loss is not finite.
    """
    figures = task.evaluate(model)
    if not all(map(math.isfinite, figures.values())):
        raise Diverged(*curve)
    curve.append(Point(round_, bytes_sent=sent, **figures))


def train_rank(
    task: Task,
    model: nn.Module,
    build: Build,
    plan: Plan,
    seed: int,
    advance: Advance,
    transport: Transport,
) -> list[Point]:
    """Train one rank's replica of a model; return its curve if it is this rank that judges.

    Raises:
        Diverged: see :func:`train`.
    """
    client = build(list(model.named_parameters()), transport)
    batches = task.clients[transport.rank].batches(
        plan.batch, batch_generator(seed, transport.rank)
    )
    groups = client.scheduled.param_groups
    rates = [group["lr"] for group in groups]
    speaks = transport.rank == 0
    curve: list[Point] = []
    for round_ in range(1, plan.rounds + 1):
        for group, rate in zip(groups, rates, strict=True):
            group["lr"] = rate * plan.schedule((round_ - 1) / plan.rounds)
        for _ in range(plan.local_steps):
            batch = next(batches)

            def closure(batch: Batch = batch) -> float:
                model.zero_grad()
                loss = task.loss(model, batch)
                loss.backward()
                return loss.detach()  # type: ignore[return-value]  # read by nobody: no waiting

            client.steps.step(closure)
        rounds = client.rounds
        if rounds and round_ == plan.rounds:
            rounds.synchronize()
        if plan.is_due(round_) and (speaks or not client.agrees):
            sent = int(client.traffic.stats()["bytes_sent"])
            with rounds.server_parameters() if rounds else nullcontext():
                judge(task, model, round_, sent, curve)
        if speaks:
            advance()
    return curve


def train_in_turn(
    task: Task,
    model: nn.Module,
    rounds: LocalRounds,
    batches: Sequence[Iterator[Batch]],
    plan: Plan,
    advance: Advance,
    *,
    upload: int = 0,
) -> list[Point]:
    """Train the clients of each round one after the other; return the server's curve.

    Args:
        task: what they learn.
        model: that ``rounds`` trains.
        rounds: says whose turn it is.
        batches: of each client of the task.
        plan: how it goes; its schedule is not followed.
        advance: called after each round.
        upload: the bytes that a client sends in a round.

    Raises:
        Diverged: with the points so far, as soon as a loss on held-out data is not finite.
    """
    curve: list[Point] = []
    with known_warnings_ignored():
        for round_ in range(1, plan.rounds + 1):
            for client in rounds.clients():
                for _ in range(plan.local_steps):
                    task.loss(model, next(batches[client])).backward()
                    rounds.step()
                    rounds.zero_grad()
            if plan.is_due(round_):
                judge(task, model, round_, round_ * upload, curve)
            advance()
    return curve


def simulated_method(
    name: str,
    labels: dict[str, Any],
    tasks: Sequence[Task],
    plan: Plan,
    make: Make,
    start: float,
    variants: Sequence[Settings] = ({},),
    note: str = "",
) -> Method:
    """Return a method whose clients ``make`` makes, for a task per seed."""

    def run(settings: Settings, seed: int, advance: Advance) -> list[Point]:
        def build(parameters: NamedParameters, transport: Transport) -> Client:
            return make(parameters, transport, settings, seed)

        return train(tasks[seed], build, plan, seed, advance)

    return Method(name, labels, run, start, variants, note)
