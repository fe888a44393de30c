"""Methods to compare, and the outcome of each: tuned settings, one run per seed."""

import json
import math
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from benchmarks.lab.runs import Point, Run, RunSpec, Tuned, mean_curve

Advance = Callable[[], None]
"""Is called once a round."""


class Diverged(Exception):
    """The loss of a model is not finite; the arguments are the points so far."""


@dataclass(frozen=True)
class Method:
    """A method with what a search of its settings needs.

    Args:
        name: its name in tables and plots.
        labels: its differences to others of that name, such as a density.
        train: runs it with given settings and a seed; raises :class:`Diverged`.
        start: the first learning rate of the search.
        variants: other settings, tried as :class:`~benchmarks.lab.search.Tuning` says; one with a
            learning rate is tried as it is.
        note: a remark for readers of the table.
    """

    name: str
    labels: dict[str, Any]
    train: Callable[[Tuned, int, Advance], list[Point]]
    start: float
    variants: Sequence[Tuned] = ({},)
    note: str = ""

    @property
    def title(self) -> str:
        """The name with the labels."""
        shown = ", ".join(
            f"{key} {value:.3g}" if isinstance(value, float) else f"{key} {value}"
            for key, value in self.labels.items()
            if value is not None
        )
        return f"{self.name} ({shown})" if shown else self.name

    def spec(self, settings: Tuned, seed: int) -> RunSpec:
        """Return the specification of a run."""
        # As a record has it: tuples are lists there.
        return RunSpec(self.name, json.loads(json.dumps(self.labels)), settings, seed)

    def run(self, spec: RunSpec, advance: Advance = lambda: None) -> Run:
        """Return the record of one run.

        Random numbers of torch's own generator, such as dropout's, follow from the seed, so that
        an interrupted experiment ends like another; afterwards the generator is as before.
        """
        run, started = Run(spec), time.monotonic()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(spec.seed)
            try:
                run.curve = self.train(spec.settings, spec.seed, advance)
            except Diverged as error:
                run.curve, run.failure = list(error.args), "diverged"
        run.seconds = time.monotonic() - started
        return run


@dataclass(frozen=True)
class Outcome:
    """The outcome of a method.

    Args:
        name, labels, note: of the method.
        tries: one run for all settings tried, on the first seed.
        runs: one run per seed, with the best of these settings.
        others: the same with the best settings of each other variant, in most cases of one seed.
    """

    name: str
    labels: dict[str, Any]
    note: str
    tries: list[Run]
    runs: list[Run]
    others: Sequence[list[Run]] = ()

    @property
    def diverged(self) -> bool:
        return any(run.failure for run in self.runs)

    @property
    def settings(self) -> Tuned:
        return self.runs[0].settings

    @property
    def is_at_edge(self) -> bool:
        """Whether the best learning rate is the largest or smallest of several tried.

        Others beyond it may be better. Tries with other settings do not count.
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
        """The bytes that a client sends per round, in the mean over the first run."""
        last = self.runs[0].curve[-1] if self.runs[0].curve else Point(1, 0, 0, 0)
        return last.bytes_sent / last.round

    def mean_curve(self) -> list[Point]:
        """Return the mean over seeds of each point that all runs have."""
        if not all(run.curve for run in self.runs):
            return []
        return mean_curve([run.curve for run in self.runs])

    def to_dict(self) -> dict[str, Any]:
        """Return the outcome as plain data for JSON; infinite losses as None."""
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
            "training": [run.curve[-1].training if run.curve else None for run in self.runs],
            "tries": [
                {**run.settings, "score": run.score if math.isfinite(run.score) else None}
                for run in self.tries
            ],
            "curves": [run.to_dict()["curve"] for run in self.runs],
        }
