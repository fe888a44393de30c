"""What methods cost in loss, where that was measured."""

import functools
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from comm_hooks.launchers.lab.methods import Method, parse_method

_FILE = Path(__file__).with_name("measured.json")


@dataclass(frozen=True)
class LossCost:
    """The loss of a method minus that of all-reduce: number of steps -> difference, in nats."""

    by_steps: Mapping[int, float]

    @property
    def judged(self) -> float:
        """The longest run's: the order of methods changes with the steps."""
        return self.by_steps[max(self.by_steps)]


@functools.cache
def measured() -> dict[str, Any]:
    """Return the file: the task, the noise of one seed, results, and the commands behind them."""
    return json.loads(_FILE.read_text())


def loss_cost(method: Method) -> LossCost | None:
    """Return what was measured of a method with exactly these options, or None.

    Example::

        >>> from comm_hooks.launchers.lab.methods import parse_method
        >>> cost = loss_cost(parse_method("local_adamw:fragments=8"))
        >>> sorted(cost.by_steps)
        [150, 450]
    """
    if method.crossing == "all_reduce" and method.optimizer == "adamw":
        return LossCost({0: 0.0})
    found = {
        result["steps"]: result["minus_all_reduce"]
        for result in measured()["results"]
        if _halves(parse_method(result["method"])) == _halves(method)
    }
    return LossCost(found) if found else None


def _halves(method: Method) -> tuple[object, ...]:
    """Return what a method is, however it was written."""
    return (
        method.crossing,
        method.crossing_options,
        method.optimizer,
        method.optimizer_options,
    )
