"""What is compared, and how a run goes."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch import nn
from torch.optim import Optimizer

from benchmarks.lab.outcomes import Advance, Method
from benchmarks.lab.runs import Point, Tuned, mean_curve
from benchmarks.lab.tasks import Task
from benchmarks.lab.training import NamedParameters, new_model
from benchmarks.studies.private_training import (
    Placement,
    PrivatePlan,
    diverging_ignored,
    train_privately,
)
from comm_hooks.collectives import Simulated, Transport, run_ranks
from comm_hooks.optim.private import DPSGD, DPAdam, DPMicroAdam


@dataclass(frozen=True)
class Scheme:
    """Where noise is added, and what travels.

    Args:
        placement: see :class:`~comm_hooks.optim.private.GaussianMechanism`; None where every rank
            trains a model of its own and nothing travels.
        compression: the ``comm_hooks`` block of a configuration, but for the size of messages.
        size: what the compressor calls that: ``"density"`` or ``"ratio"``; None if it has none.
    """

    placement: Placement | None
    compression: Mapping[str, Any]
    size: str | None = None

    def block(self, ratio: float) -> dict[str, Any]:
        """Return the configuration with messages of that share of the gradient."""
        return {**self.compression, **({self.size: ratio} if self.size else {})}


_DENSE = {"compressor": "identity"}
_TOP_K = {"compressor": "topk", "memory": "error_feedback"}
_SIGN = {"compressor": "sign", "memory": "error_feedback"}
_MASK = {"compressor": "random_k", "unbiased": False, "memory": "error_feedback"}
_COUNT_SKETCH = {"compressor": "count_sketch", "granularity": "parameter"}
_SRHT = {"compressor": "srht", "granularity": "parameter"}

CONTROL = "central:dense"
ALONE = "alone"
SCHEMES: dict[str, Scheme] = {
    CONTROL: Scheme("central", _DENSE),
    "central:topk": Scheme("central", _TOP_K, "density"),
    "central:sign": Scheme("central", _SIGN),
    "shares:dense": Scheme("shares", _DENSE),
    "shares:random_k": Scheme("shares", _MASK, "density"),
    "shares:srht": Scheme("shares", _SRHT, "ratio"),
    "shares:count_sketch": Scheme("shares", _COUNT_SKETCH, "ratio"),
    "local:dense": Scheme("local", _DENSE),
    "local:topk": Scheme("local", _TOP_K, "density"),
    "local:sign": Scheme("local", _SIGN),
    "aggregate:count_sketch": Scheme("aggregate", _COUNT_SKETCH, "ratio"),
    ALONE: Scheme(None, _DENSE),
}
"""By name: the placement, and what compresses; top-k, signs and the mask have error feedback."""

Make = Callable[[NamedParameters, float], Optimizer]
# With the first learning rate tried.
_OPTIMIZERS: dict[str, tuple[Make, float]] = {
    "DP-SGD": (lambda p, lr: DPSGD(p, lr, momentum=0.9), 0.1),
    "DP-Adam": (lambda p, lr: DPAdam(p, lr), 0.004),
    "DP-MicroAdam": (lambda p, lr: DPMicroAdam(p, lr, density=0.1), 0.004),
}
OPTIMIZERS = tuple(_OPTIMIZERS)


@dataclass(frozen=True)
class Study:
    """What all methods share.

    Args:
        tasks: one per seed, with one client.
        plan: how a run goes.
        ratio: of messages to gradients, where the compressor leaves the choice.
    """

    tasks: Sequence[Task]
    plan: PrivatePlan
    ratio: float


def make_methods(
    study: Study, schemes: Sequence[str], optimizers: Sequence[str], ranks: Sequence[int]
) -> list[Method]:
    """Return every scheme with every optimizer on every number of ranks."""
    return [
        _method(study, scheme, optimizer, count)
        for count in ranks
        for optimizer in optimizers
        for scheme in schemes
    ]


def _method(study: Study, scheme: str, optimizer: str, ranks: int) -> Method:
    def run(settings: Tuned, seed: int, advance: Advance) -> list[Point]:
        def rank(transport: Transport) -> list[Point]:
            tell = advance if transport.rank == 0 else _nothing
            return train_rank(study, scheme, optimizer, settings, seed, tell, transport)

        with diverging_ignored():
            if SCHEMES[scheme].placement is None:
                return _train_alone(study, optimizer, settings, seed, advance, ranks)
            return run_ranks(rank, ranks)[0]

    labels = {"ranks": ranks, "optimizer": optimizer}
    return Method(scheme, labels, run, _OPTIMIZERS[optimizer][1])


def train_rank(
    study: Study,
    scheme: str,
    optimizer: str,
    settings: Tuned,
    seed: int,
    advance: Advance,
    transport: Transport | None,
) -> list[Point]:
    """Train as one rank; ranks judge the same model, and return the same curve.

    Args:
        study: what all methods share.
        scheme, optimizer: their names.
        settings: the learning rate.
        seed: whose task and weights to take.
        advance: called after each step.
        transport: how to reach the others; None for the process group.
    """
    chosen = SCHEMES[scheme]
    assert chosen.placement is not None
    model, made = _make(study.tasks[seed], study.plan, optimizer, settings, seed)
    return train_privately(
        study.tasks[seed],
        model,
        made,
        study.plan,
        advance,
        placement=chosen.placement,
        compression=chosen.block(study.ratio),
        transport=transport,
    )


def _make(
    task: Task, plan: PrivatePlan, optimizer: str, settings: Tuned, seed: int
) -> tuple[nn.Module, Optimizer]:
    model = new_model(task, seed, plan.device)
    return model, _OPTIMIZERS[optimizer][0](list(model.named_parameters()), settings["lr"])


def _train_alone(
    study: Study, optimizer: str, settings: Tuned, seed: int, advance: Advance, ranks: int
) -> list[Point]:
    """Train a model per rank on that rank's samples alone; return the mean of their curves.

    Every sample is in one model, with the same sampling rate and noise multiplier as elsewhere, so
    that all models together have the same epsilon.
    """
    plan = replace(study.plan, batch=study.plan.batch / ranks)
    samples = study.tasks[seed].clients[0]
    curves = []
    for rank in range(ranks):
        own = replace(samples, indices=samples.indices[rank::ranks])
        task = replace(study.tasks[seed], clients=[own])
        model, made = _make(task, plan, optimizer, settings, seed)
        tell = advance if rank == 0 else _nothing
        transport = Simulated(1)[0]
        curves.append(train_privately(task, model, made, plan, tell, transport=transport))
    # Ranks show nothing but their models.
    return [replace(p, bytes_sent=0, peer_epsilon=p.epsilon) for p in mean_curve(curves)]


def _nothing() -> None:
    """Advance nothing."""
