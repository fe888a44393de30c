"""A private training run: the steps that the engine makes, and what they have cost.

Who is drawn and what noise is added come from the operating system, in every run anew, as they
must: a seed decides the initial weights and how data is divided, nothing else.  A study that is
repeated gives other figures, as far apart as those of its seeds.
"""

import itertools
import math
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch import nn
from torch.optim import Optimizer
from torch.utils.data import DataLoader

from benchmarks.lab.outcomes import Advance
from benchmarks.lab.runs import Point
from benchmarks.lab.tasks import Batch, Shard, Task
from benchmarks.lab.training import is_due, judge, known_warnings_ignored
from comm_hooks.collectives import Transport
from comm_hooks.exchange import Exchange, ExchangeSettings
from comm_hooks.optim.private import PrivacyEngine, PrivacyError

RECORDED = {"accountant": "rdp", "schedule": "constant"}
"""What the records of all studies of private training say."""

Placement = Literal["central", "shares", "local", "aggregate"]


@dataclass(frozen=True)
class PrivatePlan:
    """How a run goes, the same for all methods.

    Args:
        steps: how many there are.
        batch: the expected number of samples per step, over all ranks.
        sample_rate: the probability of each sample to be in a step.
        noise_multiplier: sigma.
        max_grad_norm: C.
        delta: at which epsilon is computed.
        points: how often the model is judged, evenly spread, the end included.
        micro_batch_size: samples whose gradients are in memory at a time; None for all.
        device: where.
    """

    steps: int
    batch: float
    sample_rate: float
    noise_multiplier: float
    max_grad_norm: float
    delta: float
    points: int
    micro_batch_size: int | None = None
    device: str = "cpu"

    @classmethod
    def for_samples(cls, samples: int, delta: float | None = None, **options: Any) -> "PrivatePlan":
        """Return the plan with these options for so many samples, whose number is public."""
        rate = options["batch"] / samples
        delta = default_delta(samples) if delta is None else delta
        return cls(sample_rate=rate, delta=delta, **options)

    @property
    def noise_variance(self) -> float:
        """Of the noise in a coordinate of the mean, if it is added once."""
        return (self.noise_multiplier * self.max_grad_norm / self.batch) ** 2

    def check(self, samples: int) -> None:
        """Raise ``ValueError`` for what cannot be private with so many samples."""
        positive = {"sigma": self.noise_multiplier, "--max-grad-norm": self.max_grad_norm}
        for what, value in positive.items():
            if not 0 < value < math.inf:
                raise ValueError(f"{what} must be positive, got {value:g}")
        if self.sample_rate > 1:
            raise ValueError(f"--batch: there are only {samples} samples, got {self.batch:g}")
        if not 0 < self.delta < 1 / samples:
            raise ValueError(
                f"--delta must lie in (0, 1/{samples}), one over the number of samples, got "
                f"{self.delta:g}"
            )

    def is_due(self, step: int) -> bool:
        """Return whether the model is judged after this step, counted from 1."""
        return is_due(step, self.steps, self.points)


def default_delta(samples: int) -> float:
    """Return half of one over the number of samples: about 1e-5 for CIFAR-10."""
    return 0.5 / samples


def train_privately(
    task: Task,
    model: nn.Module,
    optimizer: Optimizer,
    plan: PrivatePlan,
    advance: Advance,
    *,
    placement: Placement = "central",
    compression: Mapping[str, Any] | None = None,
    transport: Transport | None = None,
) -> list[Point]:
    """Train with a :class:`~comm_hooks.optim.private.PrivacyEngine`; return the curve.

    Every rank calls it, with a model that starts alike.

    Args:
        task: the first client's samples are divided over the ranks.
        model: on the plan's device.
        optimizer: over its parameters.
        plan: how it goes.
        advance: called after each step.
        placement: where noise is added.
        compression: as in the ``comm_hooks`` block of a configuration; None for none.
        transport: how ranks reach each other; None for the process group.

    Raises:
        Diverged: with the points so far, as soon as a loss on held-out data is not finite.
    """
    samples = task.clients[0]
    block = {"compressor": "identity"} if compression is None else compression
    exchange = Exchange(ExchangeSettings.from_dict(block), transport=transport)
    engine = PrivacyEngine()
    curve: list[Point] = []
    _, private, loader = engine.make_private(
        module=model,
        optimizer=optimizer,
        data_loader=loader_over(samples),
        loss_function=task.loss,
        noise_multiplier=plan.noise_multiplier,
        max_grad_norm=plan.max_grad_norm,
        sample_rate=plan.sample_rate,
        expected_batch_size=plan.batch,
        placement=placement,
        exchange=exchange,
        micro_batch_size=plan.micro_batch_size,
    )
    batches = itertools.chain.from_iterable(itertools.repeat(loader))
    for step, batch in enumerate(itertools.islice(batches, plan.steps), start=1):
        private.backward(batch)
        private.step()
        if plan.is_due(step):
            judge(task, model, step, int(exchange.stats()["bytes_sent"]), curve)
            curve[-1] = _with_cost(curve[-1], engine, plan.delta)
        advance()
    return curve


@contextmanager
def diverging_ignored() -> Iterator[None]:
    """Ignore warnings of what shows in the figures; to be entered outside of threads of ranks."""
    with known_warnings_ignored():
        warnings.filterwarnings("ignore", message="the gradients of .* are not finite")
        yield


def loader_over(samples: Shard) -> DataLoader[Any]:
    """Return a loader over a shard, which fetches whole batches at once."""

    def collate(places: list[int]) -> Batch:
        indices = samples.indices[torch.tensor(places)]
        return samples.prepare(samples.inputs[indices]), samples.targets[indices]

    return DataLoader(range(len(samples)), collate_fn=collate)  # type: ignore[arg-type]


def _with_cost(point: Point, engine: PrivacyEngine, delta: float) -> Point:
    try:
        peer = engine.get_epsilon(delta, observer="rank")
    except PrivacyError:
        peer = None
    return replace(point, epsilon=engine.get_epsilon(delta), peer_epsilon=peer)


def end_of(curve: Sequence[Point]) -> Point | None:
    """Return the last point; None if there is none, or nothing was private."""
    last = curve[-1] if curve else None
    return last if last and last.epsilon is not None else None
