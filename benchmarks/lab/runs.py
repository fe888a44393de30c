"""What a comparison is made of: the settings that go in, and one record per method that comes out.

Everything here is plain data that survives JSON: the launcher hands :class:`Settings` to the
workers, the workers' figures come back as a :class:`Run`, and ``runs.jsonl`` keeps both.
"""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from benchmarks.lab.model import GPTConfig
from benchmarks.lab.plain import rebuild

BASELINE = "all_reduce"
"""The method that the others are compared with."""
CONTROL = "none"
"""The method that exchanges nothing: what does worse is worth nothing."""

RECORD_VERSION = 2
"""Of the lines of ``runs.jsonl``; to be raised when a field changes its name or meaning."""


@dataclass(frozen=True)
class Settings:
    """What all methods of one comparison share. The optimizer's figures are the usual GPT ones."""

    nproc: int = 2
    steps: int = 150
    seed: int = 0
    eval_every: int = 25
    batch: int = 6  # per rank
    warmup: int = 20  # steps over which the learning rate rises
    schedule: str = "cosine"  # what it follows then: a name of lab.schedules
    learning_rate: float = 1e-3
    betas: tuple[float, float] = (0.9, 0.95)
    weight_decay: float = 0.1
    eval_windows: int = 96  # windows of text behind each loss on all data
    model: GPTConfig = field(default_factory=GPTConfig)

    @property
    def window(self) -> int:
        """Bytes of one training example: the context, and the byte after it to predict."""
        return self.model.context + 1

    def to_json(self) -> str:
        """Return the settings as one line that :meth:`from_json` reads."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, line: str) -> "Settings":
        """Rebuild settings written by :meth:`to_json`."""
        return rebuild(cls, json.loads(line))


@dataclass(frozen=True)
class LogSettings:
    """All that the log of somebody's own training tells about how it was run."""

    seed: int | None = None


@dataclass(frozen=True)
class Point:
    """One point of a curve: the loss on all data, and what it had cost one rank to get there."""

    step: int
    loss: float
    bytes_sent: int
    bytes_received: int
    seconds: float  # spent training; evaluation is not counted


@dataclass(frozen=True)
class Figures:
    """What a finished method is judged by. Bytes are those of one rank (rank 0)."""

    loss: float  # on text from all shards, mean over the replicas
    drift: float | None  # the largest |p_r - p_0| / |p_0| over ranks; None if not measured
    step_ms: float  # median after the warm-up
    sent_per_step: float  # mean after the warm-up, as is received_per_step
    received_per_step: float
    bytes_sent: int  # in the whole run, warm-up included
    bytes_received: int
    step_range_ms: float | None = None  # by which the middle half of the steps differ
    starved: float | None = None  # share of the time a rank waited for a core; the most of any rank


@dataclass
class Run:
    """One method's record: a line of ``runs.jsonl``, or a log of somebody's own training.

    ``facts`` are what a reader must know to judge the figures or to repeat them (command, text,
    machine, versions), by name. A run that did not finish has a ``failure`` and no ``figures``.
    """

    method: str
    note: str
    settings: Settings | LogSettings
    curve: list[Point] = field(default_factory=list)
    figures: Figures | None = None
    failure: str | None = None
    facts: dict[str, str] = field(default_factory=dict)

    def to_json(self) -> str:
        """Return the record as one line that :func:`parse_run` reads."""
        return json.dumps({"version": RECORD_VERSION, **asdict(self)})


def parse_run(values: Mapping[str, Any]) -> Run:
    """Rebuild a record written by :meth:`Run.to_json`.

    Raises:
        ValueError: if it was written by another version, or a field is missing, unknown or of the
            wrong type.
    """
    fields = dict(values)
    version = fields.pop("version", None)
    if version != RECORD_VERSION:
        raise ValueError(
            f"a record of version {json.dumps(version)}, and this comm-hooks reads version "
            f"{RECORD_VERSION}: run the comparison again"
        )
    run: Run = rebuild(Run, fields)
    if (run.figures is None) == (run.failure is None):
        raise ValueError("exactly one of figures and failure must be null")
    return run
