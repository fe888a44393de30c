"""Clients' and servers' optimizers, with noise and without."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch.optim import SGD, Adam, Optimizer

from benchmarks.lab.outcomes import Advance, Method
from benchmarks.lab.runs import Point, Tuned
from benchmarks.lab.simulated import train_in_turn
from benchmarks.lab.tasks import Shard, Task, build_task
from benchmarks.lab.training import NamedParameters, Plan, batch_generator, new_model
from comm_hooks.collectives import Simulated
from comm_hooks.compressors import Identity
from comm_hooks.exchange import Exchange
from comm_hooks.optim.private import PrivacyEngine
from comm_hooks.optim.private.optimizers.ada_dps import AdaS
from comm_hooks.optim.private.optimizers.public_knowledge import token_frequency
from comm_hooks.optim.rounds.local_rounds import LocalRounds
from comm_hooks.optim.rounds.participation import ClientSampling, Participation

FLOOR = 0.1
"""The least A: no word's steps are more than ten times those of the most frequent one."""

_PUBLIC_SHARE = 0.01
_SERVER_LR = 0.02
_MOMENTUM = 0.9


@dataclass(frozen=True)
class Words:
    """A task whose verses are divided over clients, and a few of which are public."""

    task: Task
    public: Shard

    def frequency(self) -> dict[str, torch.Tensor]:
        """Return A by the frequency of words in the public verses."""
        (counts, _), *_ = self.public.in_order(len(self.public))
        return {"weight": token_frequency(counts.sum(0), floor=FLOOR)}


def build(clients: int, seed: int, validation: float) -> Words:
    """Return the verses for one seed: of each client a hundredth is public, one at least."""
    whole = build_task("verses", clients=clients, seed=seed, partition="contiguous")
    samples = min(len(client) for client in whole.clients)
    task = whole.with_validation(max(_PUBLIC_SHARE, 1 / samples), seed)
    assert task.validation
    return Words(task.with_validation(validation, seed), task.validation)


@dataclass(frozen=True)
class Given:
    """What a method is made from."""

    parameters: NamedParameters
    words: Words
    settings: Tuned

    def sgd(self) -> Optimizer:
        """Return the clients' optimizer without preconditioning."""
        return SGD([p for _, p in self.parameters], self.settings["lr"])

    def ada_s(self) -> Optimizer:
        """Return the clients' optimizer with it."""
        return AdaS(self.parameters, self.settings["lr"], side_information=self.words.frequency())

    def mean(self, momentum: float = 0.0) -> Optimizer:
        """Return a server that applies the mean of the clients' updates."""
        return SGD([p for _, p in self.parameters], 1.0, momentum=momentum, dampening=momentum)

    def adam(self) -> Optimizer:
        """Return an adaptive server."""
        return Adam([p for _, p in self.parameters], self.settings["server lr"])

    def preconditioned_mean(self) -> Optimizer:
        """Return a server that divides the mean of the updates by A."""
        return AdaS(self.parameters, 1.0, side_information=self.words.frequency())


Make = Callable[[Given], tuple[Optimizer, Optimizer]]

_SERVER_LRS = tuple({"server lr": _SERVER_LR * factor} for factor in (0.2, 1.0, 5.0))

# The clients' optimizer, the server's, and what is tuned beside the clients' learning rate.
PRIVATE: dict[str, tuple[Make, Sequence[Tuned]]] = {
    "DP-FedAvg": (lambda g: (g.sgd(), g.mean()), ({},)),
    "DP-FedAdam": (lambda g: (g.sgd(), g.adam()), _SERVER_LRS),
    "AdaDPS": (lambda g: (g.ada_s(), g.mean()), ({},)),
    "A at the server": (lambda g: (g.sgd(), g.preconditioned_mean()), ({},)),
}
PLAIN: dict[str, tuple[Make, Sequence[Tuned]]] = {
    "FedAvg": (lambda g: (g.sgd(), g.mean(_MOMENTUM)), ({},)),
    "FedAdam": (lambda g: (g.sgd(), g.adam()), _SERVER_LRS),
    "AdaS": (lambda g: (g.ada_s(), g.mean(_MOMENTUM)), ({},)),
}
METHODS = {**PLAIN, **PRIVATE}


def make_methods(
    names: Sequence[str],
    words: Sequence[Words],
    *,
    plan: Plan,
    sample_rate: float,
    sigma: float,
    norms: Sequence[float],
) -> list[Method]:
    """Return the methods.

    Args:
        names: keys of ``METHODS``.
        words: a task per seed.
        plan: the course of a run.
        sample_rate: the probability of each client to be in a round.
        sigma: the noise multiplier.
        norms: C, all of which are tried: in units of a client's update.
    """

    def method(name: str) -> Method:
        make, variants = METHODS[name]
        private = name in PRIVATE
        if private:
            variants = [{**variant, "C": norm} for variant in variants for norm in norms]

        def run(settings: Tuned, seed: int, advance: Advance) -> list[Point]:
            task = words[seed].task
            clients = len(task.clients)
            participation: ClientSampling = Participation(clients, sample_rate, seed=seed)
            if private:
                participation = PrivacyEngine().private_participation(
                    clients=clients,
                    sample_rate=sample_rate,
                    noise_multiplier=sigma,
                    max_norm=settings["C"],
                )
            model = new_model(task, seed, plan.device)
            inner, server = make(Given(list(model.named_parameters()), words[seed], settings))
            exchange = Exchange(Identity(), transport=Simulated(1)[0])
            rounds = LocalRounds(inner, exchange, server, participation=participation)
            batches = [
                client.batches(min(plan.batch, len(client)), batch_generator(seed, index))
                for index, client in enumerate(task.clients)
            ]
            return train_in_turn(task, model, rounds, batches, plan, advance)

        return Method(name, {"private": "yes" if private else "no"}, run, 0.5, variants)

    return [method(name) for name in names]
