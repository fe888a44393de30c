"""Records of an experiment: what was run (``RunSpec``), what came out (``Run``), and their store.

Everything here is plain data that survives JSON.
"""

import json
import math
import statistics
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.lab.model import GPTConfig
from benchmarks.lab.plain import rebuild

BASELINE = "all_reduce"
"""The method that the others are compared with."""
CONTROL = "none"
"""The method that exchanges nothing: a worse loss means that exchanging did harm."""

Tuned = dict[str, float]
"""The tuned settings: the learning rate ``lr``, and other settings of a method."""


@dataclass(frozen=True)
class Settings:
    """The settings that all methods of one comparison share; by default the usual ones of GPT."""

    nproc: int = 2
    steps: int = 150
    seed: int = 0
    eval_every: int = 25
    batch: int = 6  # per rank
    warmup: int = 20  # steps over which the learning rate rises
    schedule: str = "cosine"  # after the warm-up: a name of lab.schedules
    learning_rate: float = 1e-3
    betas: tuple[float, float] = (0.9, 0.95)
    weight_decay: float = 0.1
    eval_windows: int = 96  # windows of text behind each loss on all data
    model: GPTConfig = field(default_factory=GPTConfig)

    @property
    def window(self) -> int:
        """Bytes of one training example: the context, and the byte after it to predict."""
        return self.model.context + 1


@dataclass(frozen=True)
class Point:
    """One point of a curve: the quality of the model, and the cost so far."""

    round: int  # or step
    loss: float  # on held-out data
    error: float  # share of wrong predictions on held-out data
    bytes_sent: int  # by one rank so far; the mean if ranks differ
    validation: float | None = None  # the loss on data that settings are tuned on
    training: float | None = None  # the loss on training samples
    seconds: float | None = None  # of training, without evaluation
    epsilon: float | None = None  # spent so far, against an observer of the model
    peer_epsilon: float | None = None  # against an observer of one rank's messages


def mean_point(points: Sequence[Point]) -> Point:
    """Return the mean of one round's points."""

    def mean(name: str) -> float | None:
        known = [value for point in points if (value := getattr(point, name)) is not None]
        return statistics.mean(known) if known else None

    return Point(
        points[0].round,
        statistics.mean(p.loss for p in points),
        statistics.mean(p.error for p in points),
        round(statistics.mean(p.bytes_sent for p in points)),
        *map(mean, ("validation", "training", "seconds", "epsilon", "peer_epsilon")),
    )


def mean_curve(curves: Sequence[Sequence[Point]]) -> list[Point]:
    """Return the mean of each point that all curves have; empty curves do not count."""
    return [mean_point(points) for points in zip(*filter(None, curves), strict=False)]


@dataclass(frozen=True)
class Figures:
    """Measurements of a finished run in processes of its own. Bytes are those of rank 0."""

    loss: float  # at the end, mean over the replicas
    drift: float | None  # the largest |p_r - p_0| / |p_0| over ranks; None if not measured
    step_ms: float  # median after the warm-up
    sent_per_step: float  # mean after the warm-up, as is received_per_step
    received_per_step: float
    bytes_sent: int  # in the whole run, warm-up included
    bytes_received: int
    step_range_ms: float | None = None  # interquartile range of the steps
    starved: float | None = None  # largest share of time in which a rank waited for a core


@dataclass(frozen=True)
class RunSpec:
    """One training run: a method, its tuned settings, and a seed.

    Args:
        method: its name in tables and plots.
        labels: other settings, such as the task, the number of ranks, or a density.
        settings: the tuned settings.
        seed: of weights and batches.
    """

    method: str
    labels: dict[str, Any]
    settings: Tuned
    seed: int

    @property
    def key(self) -> str:
        """The specification as one line of JSON; equal specifications have equal keys."""
        return json.dumps(asdict(self), sort_keys=True)


@dataclass
class Run:
    """The record of one run.

    A run that diverged or crashed has a ``failure``, and the curve up to there. ``figures`` are
    those of processes; ``facts`` are what a reader needs to repeat the run (command, text, machine,
    versions), by name.
    """

    spec: RunSpec
    curve: list[Point] = field(default_factory=list)
    failure: str | None = None
    seconds: float | None = None
    figures: Figures | None = None
    note: str = ""
    facts: dict[str, str] = field(default_factory=dict)

    @property
    def method(self) -> str:
        return self.spec.method

    @property
    def settings(self) -> Tuned:
        return self.spec.settings

    @property
    def seed(self) -> int:
        return self.spec.seed

    @property
    def loss(self) -> float:
        """The loss at the end; infinite if the run failed."""
        return math.inf if self.failure else self.curve[-1].loss

    @property
    def score(self) -> float:
        """The loss that settings are chosen by: on validation data, else on held-out data."""
        validation = self.curve[-1].validation if self.curve else None
        return self.loss if self.failure or validation is None else validation

    @property
    def error(self) -> float:
        """The share of wrong predictions at the end; 1 if the run failed."""
        return 1.0 if self.failure else self.curve[-1].error

    def to_dict(self) -> dict[str, Any]:
        """Return the record as plain data, without fields that are None or empty."""
        values = asdict(self, dict_factory=_known)
        return {key: value for key, value in values.items() if value or key == "curve"}

    def to_json(self) -> str:
        """Return the record as one line that :func:`parse_run` reads."""
        return json.dumps(self.to_dict())


def _known(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    # None is the default of every field that it may be the value of.
    return {key: value for key, value in pairs if value is not None}


def parse_run(values: Mapping[str, Any]) -> Run:
    """Rebuild a record written by :meth:`Run.to_json`.

    Raises:
        ValueError: if a field is missing, unknown or of the wrong type.
    """
    run: Run = rebuild(Run, dict(values))
    if not run.failure and not run.curve:
        raise ValueError("a run without a failure must have a curve")
    return run


class RunStore:
    """The runs of an experiment, kept in a file of JSON lines so that it can be continued.

    Args:
        file: the file; it may not exist yet.
        experiment: the settings that all runs depend on; records of other experiments in the file
            are left alone.

    Lines that are no record, such as one that was cut off, are left out.

    Example::

        >>> import tempfile
        >>> file = Path(tempfile.mkdtemp()) / "runs.jsonl"
        >>> run = Run(RunSpec("m", {}, {"lr": 0.1}, 0), [Point(1, 0.1, 0.5, 8)])
        >>> RunStore(file, {"steps": 1}).add(run)
        >>> len(RunStore(file, {"steps": 1})), len(RunStore(file, {"steps": 2}))
        (1, 0)
    """

    def __init__(self, file: Path, experiment: Mapping[str, Any] | None = None) -> None:
        self.file = file
        self._experiment = json.loads(json.dumps(experiment or {}))
        self._runs: dict[str, Run] = {}
        for line in file.read_text().splitlines() if file.exists() else ():
            with suppress(ValueError, TypeError, AttributeError):
                values = json.loads(line)
                if values.pop("experiment", {}) == self._experiment:
                    run = parse_run(values)
                    self._runs[run.spec.key] = run

    def __len__(self) -> int:
        return len(self._runs)

    def __iter__(self) -> Iterator[Run]:
        return iter(self._runs.values())

    def get(self, spec: RunSpec) -> Run | None:
        """Return the run of a specification, if there is one."""
        return self._runs.get(spec.key)

    def add(self, run: Run) -> None:
        """Keep a run."""
        self._runs[run.spec.key] = run
        experiment = {"experiment": self._experiment} if self._experiment else {}
        with self.file.open("a") as lines:
            # On a line of its own, even after one that was cut off.
            if lines.tell():
                lines.write("\n")
            lines.write(json.dumps({**experiment, **run.to_dict()}))
