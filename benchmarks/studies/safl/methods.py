"""Everything that one study compares."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from benchmarks.studies.runs import Advance, Method, Point, Settings
from benchmarks.studies.safl.budget import all_reduced
from benchmarks.studies.safl.peers import PEERS, Given, Make, Peer, build_peer
from benchmarks.studies.safl.sketched import build_safl, make_sketch
from benchmarks.studies.tasks import Task
from benchmarks.studies.training import Build, Plan, train
from comm_hooks.compressors import Compressor, GaussianSketch, Identity

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
        """The number of parameters."""
        return sum(p.numel() for p in self.tasks[0].make_model().parameters())


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
    methods = [_fed_opt(study, steps) for steps in local_steps]
    for ratio in ratios:
        methods += [_safl(study, family, ratio, first) for family in families]
        methods += [
            _safl(study, family, ratio, k) for family in families[:1] for k in local_steps[1:]
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


def _fed_opt(study: Study, local_steps: int) -> Method:
    return _server_side(study, UNCOMPRESSED, Identity(), local_steps, ratio=None)


def _safl(study: Study, family: str, ratio: float, local_steps: int) -> Method:
    return _server_side(study, f"safl {family}", make_sketch(family, ratio), local_steps, ratio)


def _server_side(
    study: Study, name: str, compressor: Compressor, local_steps: int, ratio: float | None
) -> Method:
    def build(settings: Settings, seed: int) -> Build:
        return build_safl(
            compressor,
            lr=settings["lr"],
            local_steps=local_steps,
            weight_decay=study.weight_decay,
            amsgrad=study.amsgrad,
            seed=seed,
        )

    plan = replace(study.plan, local_steps=local_steps)

    def run(settings: Settings, seed: int, advance: Advance) -> list[Point]:
        return train(study.tasks[seed], build(settings, seed), plan, seed, advance)

    note = ""
    if isinstance(compressor, GaussianSketch):
        blocks = -(-study.numel // compressor.block_size)
        note = f"{blocks} blocks, each with a sketch of its own" if blocks > 1 else ""
    return Method(name, {"ratio": ratio, "K": local_steps}, run, SAFL_START, note=note)


def _peer(study: Study, name: str, ratio: float | None, budget: float) -> Method:
    peer: Peer = PEERS[name]
    given = Given(study.numel, study.clients, study.plan.rounds, budget, study.weight_decay)
    make: Make
    note, make = peer.fit(given)
    plan = replace(study.plan, local_steps=1)

    def run(settings: Settings, seed: int, advance: Advance) -> list[Point]:
        build = build_peer(make, settings["lr"], seed)
        return train(study.tasks[seed], build, plan, seed, advance)

    return Method(name, {"ratio": ratio, "K": 1}, run, peer.start, note=note)
