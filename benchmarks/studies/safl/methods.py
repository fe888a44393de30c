"""Everything that one study compares."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from benchmarks.lab.model import count
from benchmarks.lab.outcomes import Method
from benchmarks.lab.runs import Tuned
from benchmarks.lab.simulated import simulated_method
from benchmarks.lab.tasks import Task
from benchmarks.lab.training import Client, NamedParameters, Plan
from benchmarks.studies.safl.budget import BETAS, LOCAL_LR, all_reduced, make_sketch
from benchmarks.studies.safl.peers import PEERS, Given
from comm_hooks.collectives import Transport
from comm_hooks.compressors import Compressor, GaussianSketch, Identity
from comm_hooks.exchange import Exchange
from comm_hooks.optim.rounds.algorithms import SAFL

SAFL_START = 0.016
UNCOMPRESSED = "fed_opt"
"""SAFL without a sketch, which is FedOPT (Reddi et al., ICLR 2021): Adam on the server."""


@dataclass(frozen=True)
class Study:
    """What all methods share.

    Args:
        tasks: one per seed.
        plan: with the fewest local steps.
        weight_decay: decoupled.
        amsgrad: whether SAFL's server is AMSGrad, or Adam.
    """

    tasks: Sequence[Task]
    plan: Plan
    weight_decay: float
    amsgrad: bool

    @property
    def clients(self) -> int:
        return len(self.tasks[0].clients)

    @property
    def numel(self) -> int:
        return count(self.tasks[0].make_model)


def make_methods(
    study: Study,
    *,
    ratios: Sequence[float],
    families: Sequence[str],
    peers: Sequence[str],
    local_steps: Sequence[int],
) -> list[Method]:
    """Return what is compared.

    1. FedOPT for each number of local steps;
    2. SAFL with each family at each ratio; with more local steps than the first number only the
       first family, since what families differ in has nothing to do with local steps;
    3. at each ratio below 1 every peer, fitted to the bytes of SAFL;
    4. the peers whose bytes cannot be chosen, once.
    """
    first = local_steps[0]
    methods = [_server_side(study, UNCOMPRESSED, Identity(), k, None) for k in local_steps]
    for ratio in ratios:
        sketched = [(family, first) for family in families]
        sketched += [(family, k) for family in families[:1] for k in local_steps[1:]]
        methods += [
            _server_side(study, f"safl {family}", make_sketch(family, ratio), k, ratio)
            for family, k in sketched
        ]
        if ratio < 1:
            budget = safl_bytes(make_sketch("count_sketch", ratio), study.numel, study.clients)
            matching = [name for name in peers if PEERS[name].matches]
            methods += [_peer(study, name, ratio, budget) for name in matching]
    methods += [_peer(study, name, None, 0.0) for name in peers if not PEERS[name].matches]
    return methods


def safl_bytes(compressor: Compressor, numel: int, clients: int) -> float:
    """Return what a client of SAFL sends per round: a sketch, and one flag per client."""
    return all_reduced(compressor.payload_nbytes(numel) + 4 * clients, clients)


def _server_side(
    study: Study, name: str, compressor: Compressor, local_steps: int, ratio: float | None
) -> Method:
    """Return SAFL with that compressor; without a sketch (Identity) it is FedOPT."""

    def make(
        parameters: NamedParameters, transport: Transport, settings: Tuned, seed: int
    ) -> Client:
        exchange = Exchange(compressor, granularity="bucket", seed=seed, transport=transport)
        rounds = SAFL(
            parameters,
            exchange,
            lr=settings["lr"],
            local_lr=LOCAL_LR,
            local_steps=local_steps,
            betas=BETAS,
            weight_decay=study.weight_decay,
            amsgrad=study.amsgrad,
        )
        return Client(rounds, exchange, rounds.server, rounds=rounds)

    note = ""
    if isinstance(compressor, GaussianSketch):
        blocks = -(-study.numel // compressor.block_size)
        note = f"{blocks} blocks, each with a sketch of its own" if blocks > 1 else ""
    plan = replace(study.plan, local_steps=local_steps)
    labels = {"ratio": ratio, "K": local_steps}
    return simulated_method(name, labels, study.tasks, plan, make, SAFL_START, note=note)


def _peer(study: Study, name: str, ratio: float | None, budget: float) -> Method:
    given = Given(study.numel, study.clients, study.plan.rounds, budget, study.weight_decay)
    fitted, start = PEERS[name].fit(given), PEERS[name].start
    plan = replace(study.plan, local_steps=1)
    labels = {"ratio": ratio, "K": 1}
    return simulated_method(name, labels, study.tasks, plan, fitted.make, start, note=fitted.note)
