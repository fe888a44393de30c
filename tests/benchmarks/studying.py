"""What tests of several studies need."""

from typing import Any

from benchmarks.lab.runs import Point
from benchmarks.lab.tasks import Task, build_task

NUMEL = 64 * 200 + 200 + 200 * 10 + 10
"""The parameters of the perceptron for digits."""


def nothing() -> None:
    """Advance nothing."""


def digits(clients: int, **options: Any) -> Task:
    """Return the task with its perceptron."""
    return build_task("digits", clients=clients, **options)


def straight(slope: float, count: int = 10, nbytes: int = 100) -> list[Point]:
    """Return a curve whose loss falls from 5 in a line."""
    return [Point(r, 5 - slope * r, 0.5, nbytes * r) for r in range(1, count + 1)]
