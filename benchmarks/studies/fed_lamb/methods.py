"""Local optimizers of many clients, played one after the other by one rank."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from benchmarks.lab.outcomes import Advance, Method
from benchmarks.lab.runs import Point, Tuned
from benchmarks.lab.simulated import train_in_turn
from benchmarks.lab.tasks import Task
from benchmarks.lab.training import Plan, batches_of, new_model
from comm_hooks.collectives import Simulated
from comm_hooks.compressors import Identity
from comm_hooks.exchange import Exchange
from comm_hooks.optim.rounds.algorithms import FedAMS, FedAvg, FedLAMB
from comm_hooks.optim.rounds.local_rounds import LocalRounds
from comm_hooks.optim.rounds.participation import Participation
from comm_hooks.optim.rounds.shared_moments import LocalAMSGrad

BETAS = (0.9, 0.999)
LAMBDAS = (0.0, 0.01, 0.1)
"""The weight decays that FED-LAMB is tried with, as in the paper."""

_DECAYS = tuple({"lambda": value} for value in LAMBDAS)

# With its options, the first learning rate tried, and what else is.  "client": whose steps are
# bounded by the client's own second moment, too.
_METHODS: dict[str, tuple[Callable[..., LocalRounds], dict[str, Any], float, Sequence[Tuned]]] = {
    "fed_sgd": (FedAvg, {}, 0.1, ({},)),
    "fed_ams": (FedAMS, {"betas": BETAS}, 0.001, ({},)),
    "fed_ams_client": (
        FedAMS,
        {"betas": BETAS, "bias_correction": True, "bound": "client"},
        0.016,
        ({},),
    ),
    "fed_lamb": (FedLAMB, {"betas": BETAS}, 0.02, _DECAYS),
    "fed_lamb_client": (FedLAMB, {"betas": BETAS, "bound": "client"}, 0.02, _DECAYS),
}
METHODS = tuple(_METHODS)


def make_methods(
    names: Sequence[str],
    tasks: Mapping[str, Sequence[Task]],
    *,
    plan: Plan,
    local_steps: Sequence[int],
    fraction: float,
) -> list[Method]:
    """Return every method for every partition, with a task per seed, and number of local steps."""
    return [
        _method(name, partition, tasks[partition], replace(plan, local_steps=steps), fraction)
        for partition in tasks
        for steps in local_steps
        for name in names
    ]


def _method(
    name: str, partition: str, tasks: Sequence[Task], plan: Plan, fraction: float
) -> Method:
    kind, options, start, variants = _METHODS[name]

    def run(settings: Tuned, seed: int, advance: Advance) -> list[Point]:
        task = tasks[seed]
        decay = {"weight_decay": settings["lambda"]} if kind is FedLAMB else {}
        model = new_model(task, seed, plan.device)
        rounds = kind(
            list(model.named_parameters()),
            Exchange(Identity(), transport=Simulated(1)[0]),
            lr=settings["lr"],
            participation=Participation(len(task.clients), fraction, seed=seed),
            **options,
            **decay,
        )
        batches = batches_of(task, plan.batch, seed)
        return train_in_turn(task, model, rounds, batches, plan, advance, upload=upload(rounds))

    labels = {"partition": partition, "T": plan.local_steps}
    return Method(name, labels, run, start, variants)


def upload(rounds: LocalRounds) -> int:
    """Return the bytes that a client sends in a round: its model, and its v if it has one."""
    sent = [p for group in rounds.inner.param_groups for p in group["params"]]
    if isinstance(rounds.inner, LocalAMSGrad):
        sent += rounds.inner.statistics().values()
    return sum(tensor.nbytes for tensor in sent)
