"""The simulated executor: all clients in one process, a rank each, or one rank for all in turn."""

import copy
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from benchmarks.lab.outcomes import Advance, Method
from benchmarks.lab.runs import Point, Tuned, mean_curve
from benchmarks.lab.tasks import Batch, Task
from benchmarks.lab.training import (
    Build,
    Client,
    Make,
    NamedParameters,
    Plan,
    batches_of,
    judge,
    known_warnings_ignored,
    new_model,
    train_rank,
)
from comm_hooks.collectives import Transport, run_ranks
from comm_hooks.optim.rounds.local_rounds import LocalRounds


class FlatModel(nn.Module):
    """A module whose parameters are all in one, of shape (1, d), in the order of their names.

    A compressor then gets the whole model as one vector, as papers write it. An exchange on the
    module itself would send norms and biases exactly: half a percent of the elements, and so more
    bytes than a sketch of 1/1000 has, for the parameters that matter most.

    Args:
        module: its parameters are copied. Buffers remain its own.

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
    """Train a new model on simulated ranks, one for each client; return its curve.

    Args:
        task: what is learned.
        build: makes a rank's part of the method.
        plan: the course of the run.
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


@dataclass(frozen=True)
class _Joined:
    """The shards of all clients as one, whose batches hold a batch of each."""

    task: Task
    seed: int

    def batches(self, batch_size: int, generator: torch.Generator) -> Iterator[Batch]:
        """Yield the batches that the clients would draw, one after the other; see ``Shard``."""
        for own in zip(*batches_of(self.task, batch_size, self.seed), strict=True):
            inputs, targets = zip(*own, strict=True)
            yield torch.cat(inputs), torch.cat(targets)


def train_as_one(
    task: Task, build: Build, plan: Plan, seed: int, advance: Advance, sent: float
) -> list[Point]:
    """Train as :func:`train` does with exact means of gradients at every step.

    All ranks then have the same model, and the mean of their gradients is the gradient of a batch
    that holds those of all: one model takes the steps of all of them, up to rounding, in two thirds
    of the time. ``build`` makes a world of one rank.

    Args:
        task, build, plan, seed, advance: see :func:`train`.
        sent: the bytes that each of the ranks would send per round.
    """
    joined = replace(task, clients=[_Joined(task, seed)])
    curve = train(joined, build, plan, seed, advance)
    return [replace(point, bytes_sent=round(point.round * sent)) for point in curve]


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
    """Train the clients of each round one after the other; return the curve of the shared model.

    Args:
        task: what they learn.
        model: that ``rounds`` trains.
        rounds: draws the clients of each round.
        batches: of each client of the task.
        plan: the course of the run; its schedule is not followed.
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
    variants: Sequence[Tuned] = ({},),
    note: str = "",
) -> Method:
    """Return a method whose clients ``make`` makes, for a task per seed."""

    def run(settings: Tuned, seed: int, advance: Advance) -> list[Point]:
        def build(parameters: NamedParameters, transport: Transport) -> Client:
            return make(parameters, transport, settings, seed)

        return train(tasks[seed], build, plan, seed, advance)

    return Method(name, labels, run, start, variants, note)
