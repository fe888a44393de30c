"""Local optimizers of many clients, played one after the other by one rank."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from benchmarks.studies.runs import Advance, Method, Point, Settings
from benchmarks.studies.tasks import Task
from benchmarks.studies.training import (
    NamedParameters,
    Plan,
    batch_generator,
    judge,
    known_warnings_ignored,
    new_model,
)
from comm_hooks.collectives import Simulated
from comm_hooks.compressors import Identity
from comm_hooks.exchange import Exchange
from comm_hooks.optim.rounds.algorithms import FedAMS, FedAvg, FedLAMB
from comm_hooks.optim.rounds.local_rounds import LocalRounds
from comm_hooks.optim.rounds.participation import Participation
from comm_hooks.optim.rounds.shared_moments import SharesStatistics

BETAS = (0.9, 0.999)
LAMBDAS = (0.0, 0.01, 0.1)
"""The weight decays that FED-LAMB is tried with, as in the paper."""

Make = Callable[[NamedParameters, Exchange, Participation, Settings], LocalRounds]


def _fed_sgd(
    parameters: NamedParameters, exchange: Exchange, who: Participation, settings: Settings
) -> LocalRounds:
    return FedAvg(parameters, exchange, lr=settings["lr"], participation=who)


def _fed_ams(**form: Any) -> Make:
    def make(
        parameters: NamedParameters, exchange: Exchange, who: Participation, settings: Settings
    ) -> LocalRounds:
        lr = settings["lr"]
        return FedAMS(parameters, exchange, lr=lr, betas=BETAS, participation=who, **form)

    return make


def _fed_lamb(**form: Any) -> Make:
    def make(
        parameters: NamedParameters, exchange: Exchange, who: Participation, settings: Settings
    ) -> LocalRounds:
        return FedLAMB(
            parameters,
            exchange,
            lr=settings["lr"],
            betas=BETAS,
            weight_decay=settings["lambda"],
            participation=who,
            **form,
        )

    return make


_DECAYS = tuple({"lambda": value} for value in LAMBDAS)

# With the first learning rate tried, and what else is.  "client": whose steps are bounded by the
# client's own second moment, too.
_METHODS: dict[str, tuple[Make, float, Sequence[Settings]]] = {
    "fed_sgd": (_fed_sgd, 0.1, ({},)),
    "fed_ams": (_fed_ams(), 0.001, ({},)),
    "fed_ams_client": (_fed_ams(bias_correction=True, bound="client"), 0.016, ({},)),
    "fed_lamb": (_fed_lamb(), 0.02, _DECAYS),
    "fed_lamb_client": (_fed_lamb(bound="client"), 0.02, _DECAYS),
}
METHODS = tuple(_METHODS)


@dataclass(frozen=True)
class Division:
    """Data divided over clients in one way.

    Args:
        partition: its name.
        tasks: one per seed.
    """

    partition: str
    tasks: Sequence[Task]


def make_methods(
    names: Sequence[str],
    divisions: Sequence[Division],
    *,
    plan: Plan,
    local_steps: Sequence[int],
    fraction: float,
) -> list[Method]:
    """Return every method for every division and number of local steps."""
    return [
        _method(name, division, replace(plan, local_steps=steps), fraction)
        for division in divisions
        for steps in local_steps
        for name in names
    ]


def _method(name: str, division: Division, plan: Plan, fraction: float) -> Method:
    make, start, variants = _METHODS[name]

    def run(settings: Settings, seed: int, advance: Advance) -> list[Point]:
        def build(parameters: NamedParameters, who: Participation) -> LocalRounds:
            exchange = Exchange(Identity(), transport=Simulated(1)[0])
            return make(parameters, exchange, who, settings)

        task = division.tasks[seed]
        who = Participation(len(task.clients), fraction, seed=seed)
        return _train(task, build, who, plan, seed, advance)

    labels = {"partition": division.partition, "T": plan.local_steps}
    return Method(name, labels, run, start, variants)


def _train(
    task: Task,
    build: Callable[[NamedParameters, Participation], LocalRounds],
    who: Participation,
    plan: Plan,
    seed: int,
    advance: Advance,
) -> list[Point]:
    model = new_model(task, seed, plan.device)
    rounds = build(list(model.named_parameters()), who)
    batches = [
        client.batches(plan.batch, batch_generator(seed, index))
        for index, client in enumerate(task.clients)
    ]
    curve: list[Point] = []
    with known_warnings_ignored():
        for round_ in range(1, plan.rounds + 1):
            for client in rounds.clients():
                for _ in range(plan.local_steps):
                    task.loss(model, next(batches[client])).backward()
                    rounds.step()
                    rounds.zero_grad()
            if plan.is_due(round_):
                judge(task, model, round_, round_ * upload(rounds), curve)
            advance()
    return curve


def upload(rounds: LocalRounds) -> int:
    """Return the bytes that a client sends in a round: its model, and its v if it has one."""
    sent = [p for group in rounds.inner.param_groups for p in group["params"]]
    if isinstance(rounds.inner, SharesStatistics):
        sent += rounds.inner.statistics().values()
    return sum(tensor.nbytes for tensor in sent)
