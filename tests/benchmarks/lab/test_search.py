"""As many tries for all, and the best of them on every seed."""

import json
import math
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from benchmarks.lab.outcomes import Advance, Diverged, Method
from benchmarks.lab.runs import Point, Tuned
from benchmarks.lab.progress import Display, open_display
from benchmarks.lab.search import run_method, search


@given(
    best=st.floats(-2, 2),
    start=st.floats(-1, 1),
    tries=st.integers(1, 8),
    ceiling=st.floats(0.1, 3),
)
def test_all_methods_get_as_many_tries_and_the_best_is_approached(
    best: float, start: float, tries: int, ceiling: float
) -> None:
    """The loss is a valley in the logarithm, beyond its ceiling it diverges."""

    def loss(rate: float) -> float:
        place = math.log10(rate)
        return abs(place - best) if place <= best + ceiling else math.inf

    calls: list[float] = []

    def counted(rate: float) -> float:
        calls.append(rate)
        return loss(rate)

    tried = search(counted, 10.0**start, tries)
    assert len(calls) == tries == len(tried)
    assert tried == {rate: loss(rate) for rate in calls}
    # Each try comes log10(4) nearer until the valley lies between two tries.
    walked = math.ceil(abs(best - start) / math.log10(4)) + 2
    if tries >= walked:
        assert min(tried.values()) <= math.log10(4) + 1e-9
    if tries == 8 and abs(best - start) < 1:
        assert min(tried.values()) <= math.log10(4) / 2 + 1e-9


@given(best=st.floats(-6, 6), tries=st.integers(3, 8), more=st.integers(1, 12))
def test_more_is_tried_only_while_the_best_is_at_the_edge(
    best: float, tries: int, more: int
) -> None:
    def loss(rate: float) -> float:
        return abs(math.log10(rate) - best)

    tried, fewer = search(loss, 1.0, tries, more=more), search(loss, 1.0, tries)
    assert list(tried)[:tries] == list(fewer)
    rates = sorted(fewer)
    if min(fewer, key=loss) in (rates[0], rates[-1]):
        assert len(tried) > tries
        inside = min(tried, key=loss) not in (min(tried), max(tried))
        assert inside or len(tried) == tries + more
    else:
        assert tried == fewer


@pytest.mark.parametrize("tries", [1, 2])
def test_too_few_tries_to_lie_between_others_stay_as_few(tries: int) -> None:
    assert len(search(lambda rate: rate, 1.0, tries, more=5)) == tries


def method_of(loss: Callable[[Tuned, int], float], **options: Any) -> Method:
    """A method whose runs have one point of that loss, or none if it is not finite."""

    def train(settings: Tuned, seed: int, advance: Advance) -> list[Point]:
        advance()
        value = loss(settings, seed)
        if not math.isfinite(value):
            raise Diverged
        return [Point(1, value, value / 10, 100)]

    return Method("method", {}, train, **options)


@pytest.fixture
def display() -> Iterator[Display]:
    with open_display(Console(quiet=True), methods=1) as display:
        yield display


def test_the_best_settings_of_the_first_seed_are_run_on_all(display: Display) -> None:
    def loss(settings: Tuned, seed: int) -> float:
        return abs(math.log2(settings["lr"])) + settings["decay"] + seed

    method = method_of(loss, start=0.25, variants=[{"decay": 2.0}, {"decay": 1.0}])
    outcome = run_method(method, seeds=[0, 1, 2], tries=2, rounds=1, display=display, reached=str)
    assert [run.settings for run in outcome.tries] == [
        {"lr": lr, "decay": decay} for decay in (2.0, 1.0) for lr in (0.25, 1.0)
    ]
    assert outcome.settings == {"lr": 1.0, "decay": 1.0}
    assert outcome.losses == [1, 2, 3]
    assert [run.seed for run in outcome.runs] == [0, 1, 2]
    assert outcome.mean_curve() == [Point(1, 2.0, pytest.approx(0.2), 100)]


def test_settings_are_chosen_by_validation_data_where_there_are_such(display: Display) -> None:
    def train(settings: Tuned, seed: int, advance: Advance) -> list[Point]:
        distance = abs(math.log2(settings["lr"]))
        return [Point(1, loss=-distance, error=0.5, bytes_sent=0, validation=distance)]

    method = Method("method", {}, train, start=0.25)
    outcome = run_method(method, seeds=[0], tries=4, rounds=1, display=display, reached=str)
    assert outcome.settings == {"lr": 1.0}
    assert outcome.losses == [0.0]
    assert {attempt["validation"] for attempt in outcome.to_dict()["tries"]} == {0.0, 1.0, 2.0}


def test_settings_that_name_a_learning_rate_are_tried_as_they_are(display: Display) -> None:
    method = method_of(lambda s, seed: s["lr"], start=1.0, variants=[{"lr": 3.0}, {"lr": 2.0}])
    outcome = run_method(method, seeds=[0], tries=5, rounds=1, display=display, reached=str)
    assert [run.settings["lr"] for run in outcome.tries] == [3.0, 2.0]
    assert outcome.settings == {"lr": 2.0}


def test_a_method_that_always_diverges_is_reported_as_such(display: Display) -> None:
    method = method_of(lambda s, seed: math.nan, start=1.0)
    outcome = run_method(method, seeds=[0, 1], tries=3, rounds=1, display=display, reached=str)
    assert outcome.diverged
    assert len(outcome.tries) == 6
    assert len(outcome.runs) == 1
    record = outcome.to_dict()
    assert record["mean_loss"] is None
    json.dumps(record, allow_nan=False)
