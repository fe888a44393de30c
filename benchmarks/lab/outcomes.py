"""What a study is made of: curves, runs, and the outcome of each method.

Everything here is plain data that survives JSON.
"""

import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import torch

Settings = dict[str, float]
"""What is tuned: the learning rate ``lr``, and whatever else a method wants tried."""

Advance = Callable[[], None]
"""Is called once a round."""


@dataclass(frozen=True)
class Point:
    """One point of a curve: what the model is worth, and what it had cost to get there."""

    round: int
    loss: float  # cross-entropy on held-out data, in nats
    error: float  # the share of wrong predictions there
    bytes_sent: int  # by one client so far; the mean if clients differ
    validation: float | None = None  # the loss on data that settings are tuned on
    training: float | None = None  # the loss on training samples


def mean_point(points: Sequence[Point]) -> Point:
    """Return the mean of one round's points."""

    def mean(values: Sequence[float | None]) -> float | None:
        known = [value for value in values if value is not None]
        return statistics.mean(known) if known else None

    return Point(
        points[0].round,
        statistics.mean(p.loss for p in points),
        statistics.mean(p.error for p in points),
        round(statistics.mean(p.bytes_sent for p in points)),
        mean([p.validation for p in points]),
        mean([p.training for p in points]),
    )


class Diverged(Exception):
    """A model whose loss is not finite."""


@dataclass(frozen=True)
class Run:
    """One training run.  Of one that diverged, the curve up to there."""

    seed: int
    settings: Settings
    curve: list[Point] = field(default_factory=list)
    diverged: bool = False

    @property
    def loss(self) -> float:
        """The loss at the end; infinite if the run diverged."""
        return math.inf if self.diverged else self.curve[-1].loss

    @property
    def score(self) -> float:
        """What settings are chosen by: the loss on validation data, or without such the loss."""
        validation = self.curve[-1].validation if self.curve else None
        return self.loss if self.diverged or validation is None else validation

    @property
    def error(self) -> float:
        """The share of wrong predictions at the end; 1 if the run diverged."""
        return 1.0 if self.diverged else self.curve[-1].error


@dataclass(frozen=True)
class Method:
    """Something to compare.

    Args:
        name: what it is called in tables and plots.
        labels: what sets it apart from others of that name, such as a density.
        train: runs it with given settings and a seed; raises :class:`Diverged`, whose arguments are
            the points so far.
        start: the first learning rate that is tried.
        variants: other settings, every one of which gets as many tries; their learning rate may be
            given, and then is the only one.
        note: what a reader of the table should know.
    """

    name: str
    labels: dict[str, Any]
    train: Callable[[Settings, int, Advance], list[Point]]
    start: float
    variants: Sequence[Settings] = ({},)
    note: str = ""

    @property
    def title(self) -> str:
        """The name with what sets it apart."""
        return _title(self.name, self.labels)

    def run(self, settings: Settings, seed: int, advance: Advance) -> Run:
        """Return the record of one run.

        What torch's own generator gives, such as dropout, follows from the seed, so that a study
        that was interrupted ends like one that was not; afterwards it is as it was.
        """
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            try:
                return Run(seed, settings, self.train(settings, seed, advance))
            except Diverged as error:
                return Run(seed, settings, list(error.args), diverged=True)


@dataclass(frozen=True)
class Outcome:
    """What became of a method.

    Args:
        tries: one run for all settings tried, on the first seed.
        runs: one run per seed, with the best of these settings.
    """

    name: str
    labels: dict[str, Any]
    note: str
    tries: list[Run]
    runs: list[Run]

    @property
    def title(self) -> str:
        """The name with what sets it apart."""
        return _title(self.name, self.labels)

    @property
    def diverged(self) -> bool:
        return any(run.diverged for run in self.runs)

    @property
    def settings(self) -> Settings:
        return self.runs[0].settings

    @property
    def is_at_edge(self) -> bool:
        """Whether the best learning rate is the largest or smallest of several tried.

        Others beyond it may be better.  Those tried with other settings do not count.
        """
        others = {key: value for key, value in self.settings.items() if key != "lr"}
        rates = [
            run.settings["lr"]
            for run in self.tries
            if {key: value for key, value in run.settings.items() if key != "lr"} == others
        ]
        return len(rates) > 1 and self.settings["lr"] in (min(rates), max(rates))

    @property
    def losses(self) -> list[float]:
        return [run.loss for run in self.runs]

    @property
    def errors(self) -> list[float]:
        return [run.error for run in self.runs]

    @property
    def bytes_per_round(self) -> float:
        """What a client sends per round, in the mean over all rounds of the first run."""
        last = self.runs[0].curve[-1] if self.runs[0].curve else Point(1, 0, 0, 0)
        return last.bytes_sent / last.round

    def mean_curve(self) -> list[Point]:
        """Return the mean over seeds of each point that all runs have."""
        return [mean_point(points) for points in zip(*(r.curve for r in self.runs), strict=False)]

    def to_dict(self) -> dict[str, Any]:
        """Return everything, for JSON; infinite losses as None."""
        losses = [loss if math.isfinite(loss) else None for loss in self.losses]
        return {
            "name": self.name,
            "labels": self.labels,
            "note": self.note,
            "settings": self.settings,
            "lr_is_at_edge": self.is_at_edge,
            "bytes_per_client_and_round": self.bytes_per_round,
            "mean_error": statistics.mean(self.errors),
            "errors": self.errors,
            "mean_loss": None if None in losses else statistics.mean(self.losses),
            "losses": losses,
            "tries": [
                {
                    **run.settings,
                    "loss": None if run.diverged else run.loss,
                    "error": run.error,
                    "validation": run.score if math.isfinite(run.score) else None,
                }
                for run in self.tries
            ],
            "runs": [asdict(run) for run in self.runs],
        }


def _title(name: str, labels: dict[str, Any]) -> str:
    shown = ", ".join(
        f"{key} {value:.3g}" if isinstance(value, float) else f"{key} {value}"
        for key, value in labels.items()
        if value is not None
    )
    return f"{name} ({shown})" if shown else name
