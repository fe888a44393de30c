"""What a comparison is made of: the settings that go in, and one record per method that comes out.

Everything here is plain data that survives JSON: the launcher hands :class:`Settings` to the
workers, the workers' figures come back as a :class:`Run`, and ``runs.jsonl`` keeps both.
"""

import json
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from comm_hooks.launchers.compare.model import GPTConfig


@dataclass(frozen=True)
class Settings:
    """What all methods of one comparison share. The optimizer's figures are the usual GPT ones."""

    nproc: int = 2
    steps: int = 150
    seed: int = 0
    eval_every: int = 25
    batch: int = 6  # per rank
    warmup: int = 20  # steps over which the learning rate rises
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
        return cls._from_dict(json.loads(line))

    @classmethod
    def _from_dict(cls, values: dict[str, Any]) -> "Settings":
        first, second = values["betas"]
        model = GPTConfig(**values["model"])
        return cls(**{**values, "betas": (first, second), "model": model})


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
    drift: float  # the largest |p_r - p_0| / |p_0| over ranks; 0 where replicas agree
    step_ms: float  # median after the warm-up
    sent_per_step: float  # mean after the warm-up, as is received_per_step
    received_per_step: float
    bytes_sent: int  # in the whole run, warm-up included
    bytes_received: int


@dataclass
class Run:
    """One method's record: a line of ``runs.jsonl``. Exactly one of the last two is given."""

    method: str
    note: str
    settings: Settings
    curve: list[Point] = field(default_factory=list)
    figures: Figures | None = None
    failure: str | None = None

    def to_json(self) -> str:
        """Return the record as one line that :func:`read_runs` reads."""
        return json.dumps(asdict(self))


def read_runs(path: Path) -> list[Run]:
    """Read the records of a ``runs.jsonl``."""
    return [_run_from_dict(json.loads(line)) for line in path.read_text().splitlines()]


def _run_from_dict(values: dict[str, Any]) -> Run:
    figures = values["figures"]
    return Run(
        method=values["method"],
        note=values["note"],
        settings=Settings._from_dict(values["settings"]),
        curve=[Point(**point) for point in values["curve"]],
        figures=Figures(**figures) if figures else None,
        failure=values["failure"],
    )


def figures_of(runs: Iterable[Run], method: str) -> Figures | None:
    """Return what the named method reached, or None if it failed or was not compared."""
    return next((run.figures for run in runs if run.method == method), None)
