"""One training run, and its record: a line of JSON."""

import datetime
import json
import math
import time
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
import torch.distributed as dist

from benchmarks.lab.methods import parse_method
from benchmarks.lab.outcomes import Diverged, Point
from benchmarks.lab.plain import rebuild
from benchmarks.lab.processes import spawn_ranks
from benchmarks.lab.runs import Settings
from benchmarks.lab.schedules import SCHEDULES, warmed_up
from benchmarks.lab.simulated import (
    Build,
    Client,
    NamedParameters,
    Plan,
    mean_curve,
    new_model,
    train,
    train_rank,
)
from benchmarks.quality.clients import make_client, make_hooked_client
from benchmarks.quality.settings import PRESETS, Setting, build
from comm_hooks.collectives import TorchDistributed, Transport

WARM_UP = 0.1
"""The share of the steps over which the learning rate rises."""
POINTS = 4
BETAS = 0.9, 0.95


@dataclass(frozen=True)
class Wanted:
    """A run that may or may not have a record.

    Args:
        setting: what is trained.
        method: as ``python -m benchmarks.compare --hooks`` takes it.
        lr: the largest learning rate.
        seed: of weights and batches.
    """

    setting: Setting
    method: str
    lr: float
    seed: int


@dataclass(frozen=True)
class Record:
    """A finished run.

    Args:
        wanted: which.
        loss: on held-out data at the end; None if it diverged.
        error: share of wrong predictions on held-out data.
        bits: sent per parameter and step by one rank, in the mean.
        curve: held-out losses on the way, evenly spread.
        seconds: it took.
        date: when.
    """

    wanted: Wanted
    loss: float | None
    error: float | None
    bits: float
    curve: list[float]
    seconds: float
    date: str

    @property
    def judged(self) -> float:
        """The loss; infinite if the run diverged."""
        return math.inf if self.loss is None else self.loss

    def to_json(self) -> str:
        """Return the record as one line."""
        return json.dumps(asdict(self))


def read_records(path: Path) -> list[Record]:
    """Return the records of a file, if there is one.

    Raises:
        ValueError: for a line that is not one; names it.
    """
    records = []
    for number, line in enumerate(path.read_text().splitlines() if path.exists() else [], start=1):
        try:
            records.append(rebuild(Record, json.loads(line)))
        except ValueError as error:
            raise ValueError(
                f"{path}, line {number}: no record ({error}): remove it, and it is run again"
            ) from None
    return records


def perform(wanted: Wanted, *, processes: bool = False, threads: int = 1) -> Record:
    """Train, and return the record.

    Args:
        wanted: the run.
        processes: each rank is a process of its own, joined by gloo, as it always is where a method
            needs DDP; else ranks take turns in this.
        threads: of torch.

    Raises:
        ValueError: for a method that cannot train here, and data that is missing.
    """
    torch.set_num_threads(threads)
    started = time.monotonic()
    try:
        if processes or parse_method(wanted.method).needs_ddp:
            curves = spawn_ranks(wanted.setting.ranks, _train_in_process, wanted, threads)
            curve = mean_curve([[Point(*values) for values in rows] for rows in curves])
        else:
            task = build(wanted.setting.task, wanted.setting.ranks)
            curve = train(task, _build(wanted), make_plan(wanted.setting), wanted.seed, _nothing)
    except Diverged:
        curve = []
    last = curve[-1] if curve else None
    sent = last.bytes_sent if last else 0
    return Record(
        wanted,
        loss=last.loss if last else None,
        error=last.error if last else None,
        bits=8 * sent / wanted.setting.steps / PRESETS[wanted.setting.task].parameters,
        curve=[round(point.loss, 5) for point in curve],
        seconds=round(time.monotonic() - started, 1),
        date=f"{datetime.datetime.now(datetime.timezone.utc):%Y-%m-%d}",
    )


def make_plan(setting: Setting) -> Plan:
    """Return how all runs of a setting go."""
    steps = setting.steps
    factor = warmed_up(SCHEDULES[setting.schedule], max(1, round(WARM_UP * steps)), steps)
    return Plan(steps, 1, setting.batch, POINTS, lambda over: factor(round(over * steps)))


def _settings(wanted: Wanted) -> Settings:
    return Settings(
        nproc=wanted.setting.ranks,
        steps=wanted.setting.steps,
        seed=wanted.seed,
        learning_rate=wanted.lr,
        betas=BETAS,
        warmup=max(1, round(WARM_UP * wanted.setting.steps)),
    )


def _build(wanted: Wanted) -> Build:
    method = parse_method(wanted.method)

    def build(named: NamedParameters, transport: Transport) -> Client:
        return make_client(method, named, transport, _settings(wanted))

    return build


def _train_in_process(wanted: Wanted, threads: int) -> list[tuple[int, float, float, int]]:
    """Train one rank in a process of its own; return its curve as plain numbers."""
    torch.set_num_threads(threads)
    task = build(wanted.setting.task, wanted.setting.ranks)
    model = new_model(task, wanted.seed, "cpu")
    make = _build(wanted)
    method = parse_method(wanted.method)
    if method.needs_ddp:
        # Rank 0 judges alone: nothing may be broadcast then.
        trainer = method.connect(model, _settings(wanted), broadcast_buffers=False)
        model, make = trainer.ddp, lambda named, transport: make_hooked_client(trainer)
    plan, transport = make_plan(wanted.setting), TorchDistributed(dist.group.WORLD)
    curve = train_rank(task, model, make, plan, wanted.seed, _nothing, transport)
    return [(p.round, p.loss, p.error, p.bytes_sent) for p in curve]


def _nothing() -> None:
    pass
