"""How a method is trained in a setting, and the quality it keeps."""

import functools
import math
import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace

import torch
import torch.distributed as dist

from benchmarks.lab.methods import Pair, parse_method
from benchmarks.lab.outcomes import Advance, Diverged, Method, Outcome
from benchmarks.lab.processes import spawn_ranks
from benchmarks.lab.runs import BASELINE, CONTROL, Point, Run, Settings, Tuned, mean_curve
from benchmarks.lab.schedules import SCHEDULES, warmed_up
from benchmarks.lab.search import Tuning
from benchmarks.lab.simulated import train, train_as_one
from benchmarks.lab.training import Client, NamedParameters, Plan, new_model, train_rank
from benchmarks.quality.settings import PRESETS, Setting, build
from comm_hooks.collectives import TorchDistributed, Transport

WARM_UP = 0.1
"""The share of the steps over which the learning rate rises."""
POINTS = 1
BETA2 = 0.95
CLIP_NORM = 1.0
"""Of gradients: of the mean where gradients are averaged, else of each rank's own."""
TRIES = 4
"""Learning rates per method: three for one momentum, one for the other, more for the better."""
_FACTOR, _MORE = 2.0, 4
_SHORT, _EARLIER = 500, 0.25
"""Trainings of fewer steps have a second, worse valley at large rates: searches begin below it."""
_SURE = 3.0
"""The worth of exchanging must be so many times its own uncertainty to be divided by."""
_HALVED = "low_communication", "local_variance_adam"
"""Optimizers that halve the horizon of AdamW's first moment: they use 0.8 where AdamW uses 0.9."""


@dataclass(frozen=True)
class Controls:
    """The two methods between which the quality of a method lies.

    Args:
        none: without exchange.
        all_reduce: with exact means.
    """

    none: str
    all_reduce: str


ADAMW = Controls(CONTROL, BASELINE)
"""The user's own training, with AdamW."""


def same_optimizer(method: str) -> Controls:
    """Return the controls that take a method's own local steps.

    Example::

        >>> same_optimizer("low_communication:bits=0.12")
        Controls(none='none+laprop', all_reduce='all_reduce+laprop')
        >>> same_optimizer("quantize:bits=2") == ADAMW
        True
    """
    pair = parse_method(method)
    inner = pair.optimizer_options.get("inner")
    if inner == "muon" or pair.optimizer in ("mu_lo_co", "muon_adamw"):
        return Controls("none+muon_adamw", "all_reduce+muon_adamw")
    if pair.optimizer in ("low_communication", "laprop"):
        return Controls("none+laprop", "all_reduce+laprop")
    if pair.optimizer == "local_variance_adam":
        return Controls("none+laprop", "identity+local_variance_adam")
    return ADAMW


def is_control(method: str) -> bool:
    """Return whether a method is the control of another."""
    return method in asdict(ADAMW).values() or method in asdict(same_optimizer(method)).values()


def with_controls(methods: Sequence[str]) -> list[str]:
    """Return methods after all their controls, each once."""
    pairs = [ADAMW, *map(same_optimizer, methods)]
    names = [name for pair in pairs for name in (pair.all_reduce, pair.none)]
    return list(dict.fromkeys([*names, *methods]))


def momenta(method: str) -> list[Tuned]:
    """Return the momenta that a method is tuned over, the same two of each local optimizer.

    The one that is most often better comes first: it gets more tries.
    """
    pair = parse_method(method)
    if pair.optimizer in ("mu_lo_co", "muon_adamw"):
        return [{"beta1": 0.9, "momentum": 0.95}, {"beta1": 0.8, "momentum": 0.8}]
    shorter = 0.9 if pair.optimizer in _HALVED else 0.8
    return [{"beta1": shorter}, {"beta1": (1 + shorter) / 2}]


def make_tuning(tries: int, seeds: int) -> Tuning:
    """Return the rule by which all methods are tuned."""
    return Tuning(tries, range(seeds), _FACTOR, _MORE)


def make_method(setting: Setting, spec: str) -> Method:
    """Return a method in a setting.

    Args:
        setting: the setting.
        spec: the method as ``python -m benchmarks.compare --hooks`` takes it.
    """
    run = functools.partial(_train, setting, spec, parse_method(spec).needs_ddp)
    start = PRESETS[setting.task].start * (_EARLIER if setting.steps < _SHORT else 1)
    return Method(spec, asdict(setting), run, start, momenta(spec))


def bits_of(run: Run) -> float:
    """Return the bits that a rank sent per parameter and step."""
    setting = Setting(**run.spec.labels)
    sent = run.curve[-1].bytes_sent if run.curve else 0
    return 8 * sent / setting.steps / PRESETS[setting.task].parameters


def make_plan(setting: Setting) -> Plan:
    """Return the course of all runs of a setting."""
    steps = setting.steps
    factor = warmed_up(SCHEDULES[setting.schedule], max(1, round(WARM_UP * steps)), steps)
    return Plan(steps, 1, setting.batch, POINTS, lambda over: factor(round(over * steps)))


def _train(
    setting: Setting, spec: str, processes: bool, settings: Tuned, seed: int, advance: Advance
) -> list[Point]:
    """Train on ranks that take turns, or each in a process of its own, as DDP needs them."""
    torch.set_num_threads(1)
    if processes:
        curves = spawn_ranks(setting.ranks, _train_in_process, setting, spec, settings, seed)
        if None in curves:
            raise Diverged
        return mean_curve([[Point(*values) for values in rows] for rows in curves])
    pair, shared = _with_settings(setting, spec, settings, seed)

    def make(named: NamedParameters, transport: Transport) -> Client:
        return pair.attach(named, shared, transport, CLIP_NORM)

    task, plan = build(setting.task, setting.ranks), make_plan(setting)
    if pair.communication != BASELINE:
        return train(task, make, plan, seed, advance)
    ring = 2 * (setting.ranks - 1) / setting.ranks
    return train_as_one(
        task, make, plan, seed, advance, 4 * ring * PRESETS[setting.task].parameters
    )


def _with_settings(setting: Setting, spec: str, tuned: Tuned, seed: int) -> tuple[Pair, Settings]:
    """Return the method with the tuned settings, and the settings of the comparison."""
    own = {key: value for key, value in tuned.items() if key not in ("lr", "beta1")}
    pair = parse_method(spec)
    pair = replace(pair, optimizer_options={**pair.optimizer_options, **own})
    shared = Settings(
        nproc=setting.ranks,
        steps=setting.steps,
        seed=seed,
        learning_rate=tuned["lr"],
        betas=(tuned["beta1"], BETA2),
        warmup=max(1, round(WARM_UP * setting.steps)),
    )
    return pair, shared


def _train_in_process(
    setting: Setting, spec: str, tuned: Tuned, seed: int
) -> list[tuple[int, float, float, int]] | None:
    """Train one rank in a process of its own; return its curve as plain numbers."""
    task = build(setting.task, setting.ranks)
    model = new_model(task, seed, "cpu")
    pair, shared = _with_settings(setting, spec, tuned, seed)

    def make(named: NamedParameters, transport: Transport) -> Client:
        if pair.needs_ddp:
            # Rank 0 judges alone: nothing may be broadcast then.
            return pair.connect(model, shared, CLIP_NORM, broadcast_buffers=False)
        return pair.attach(named, shared, transport, CLIP_NORM)

    plan, transport = make_plan(setting), TorchDistributed(dist.group.WORLD)
    try:
        curve = train_rank(task, model, make, plan, seed, lambda: None, transport)
    except Diverged:
        return None
    return [(p.round, p.loss, p.error, p.bytes_sent) for p in curve]


@dataclass(frozen=True)
class Quality:
    """The quality that a method keeps: (none - method) / (none - all-reduce), in loss.

    Args:
        mean: ratio of the mean differences over the seeds that all three have.
        spread: half the distance between the largest and the smallest quality of a single seed.
        seeds: how many.
    """

    mean: float
    spread: float
    seeds: int

    def __str__(self) -> str:
        spread = f" ± {100 * self.spread:.0f}" if self.seeds > 1 else ""
        return f"{100 * self.mean:.0f}{spread} %"


def quality_kept(
    method: Sequence[Run], none: Sequence[Run], all_reduce: Sequence[Run]
) -> Quality | None:
    """Return the quality that a method keeps.

    None if there is no seed that all three finished, and if the worth of exchanging is too little
    to be told from the noise between seeds.
    """
    by_seed = [{run.seed: run for run in runs} for runs in (none, method, all_reduce)]
    seeds = sorted(set.intersection(*map(set, by_seed)))
    losses = [[runs[seed].loss for runs in by_seed] for seed in seeds]
    finished = [(n, m, a) for n, m, a in losses if math.isfinite(n) and math.isfinite(a)]
    if not finished:
        return None
    worth = [n - a for n, _, a in finished]
    mean = statistics.mean(worth)
    noise = statistics.stdev(worth) / math.sqrt(len(worth)) if len(worth) > 1 else 0.0
    if mean <= 0 or mean < _SURE * noise:
        return None
    kept = [n - m for n, m, _ in finished]
    if -math.inf in kept:  # a run that diverged keeps nothing
        return Quality(-math.inf, math.inf, len(kept))
    ratios = [k / w for k, w in zip(kept, worth, strict=True)]
    return Quality(statistics.mean(kept) / mean, (max(ratios) - min(ratios)) / 2, len(ratios))


Found = dict[tuple[Setting, str], Outcome]


def quality_of(setting: Setting, method: str, controls: Controls, found: Found) -> Quality | None:
    """Return the quality that a method keeps in a setting; None if that cannot be told."""
    names = method, controls.none, controls.all_reduce
    outcomes = [found.get((setting, name)) for name in names]
    return quality_kept(*[outcome.runs if outcome else [] for outcome in outcomes])
