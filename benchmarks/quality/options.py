"""What the commands of this package share: which settings, and where records are."""

import itertools
import math
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Annotated, Any

import typer

from benchmarks.lab.schedules import SCHEDULES
from benchmarks.quality.settings import COSINE, PRESETS, Setting
from comm_hooks.config import unknown

RESULTS = Path(__file__).parents[1] / "results" / "quality"

Tasks = Annotated[str, typer.Option(metavar="LIST", help=f"Of {', '.join(PRESETS)}.")]
Ranks = Annotated[str, typer.Option(metavar="LIST", help="Numbers of ranks.")]
Batches = Annotated[str, typer.Option(metavar="LIST", help="Samples per step and rank.")]
Tokens = Annotated[str, typer.Option(metavar="LIST", help="Tokens per parameter.")]


def parse_settings(
    tasks: str, ranks: str, batches: str, tokens: str, schedule: str = COSINE
) -> list[Setting]:
    """Return all combinations of what a command line lists, divided by commas.

    Raises:
        ValueError: for a name that is not known, and a number that is none or not positive.
    """
    combinations = itertools.product(
        [_known("task", task, PRESETS) for task in tasks.split(",")],
        _numbers("--ranks", ranks, int),
        _numbers("--batches", batches, int),
        _numbers("--tokens", tokens, float),
    )
    schedule = _known("schedule", schedule, SCHEDULES)
    return [Setting(*each, schedule) for each in combinations]


def _numbers(option: str, text: str, kind: Callable[[str], Any]) -> list[Any]:
    try:
        numbers = [kind(each) for each in text.split(",")]
    except ValueError:
        raise ValueError(f"{option}: {text!r} is no list of numbers such as 1,2,4") from None
    for number in numbers:
        if not 0 < number < math.inf:
            raise ValueError(f"{option}: {number} is not positive and finite")
    return numbers


def _known(what: str, name: str, names: Collection[str]) -> str:
    if name not in names:
        raise ValueError(unknown(what, name, names))
    return name
