"""As many tries for all, and the best of them on every seed."""

import json
import math
import statistics
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.lab.outcomes import Advance, Diverged, Method, Outcome
from benchmarks.lab.runs import Point, RunStore, Tuned
from benchmarks.lab.search import Tuning, search


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
        value = loss(settings, seed)
        if not math.isfinite(value):
            raise Diverged
        return [Point(1, value, value / 10, 100)]

    return Method("method", {}, train, **options)


def tune(method: Method, tuning: Tuning) -> tuple[Outcome, RunStore]:
    """Make all runs of a method."""
    runs = RunStore(Path(tempfile.mkdtemp()) / "runs.jsonl")
    while specs := tuning.next(method, runs):
        for spec in specs:
            runs.add(method.run(spec))
    outcome = tuning.outcome(method, runs)
    assert outcome is not None
    return outcome, runs


TRIED = {2.0: (0.25, 1.0, 4.0), 1.0: (0.25, 1.0, 4.0)}
"""Three of four tries for the first decay, one for the second, which leads and gets two more."""


def test_the_best_settings_of_the_first_seed_are_run_on_all() -> None:
    def loss(settings: Tuned, seed: int) -> float:
        return abs(math.log2(settings["lr"])) + settings["decay"] + seed

    method = method_of(loss, start=0.25, variants=[{"decay": 2.0}, {"decay": 1.0}])
    outcome, _ = tune(method, Tuning(tries=4, seeds=[0, 1, 2]))
    assert [run.settings for run in outcome.tries] == [
        {"lr": lr, "decay": decay} for decay, rates in TRIED.items() for lr in rates
    ]
    assert outcome.settings == {"lr": 1.0, "decay": 1.0}
    assert outcome.losses == [1, 2, 3]
    assert [run.seed for run in outcome.runs] == [0, 1, 2]
    assert outcome.mean_curve() == [Point(1, 2.0, pytest.approx(0.2), 100)]


def test_settings_are_chosen_by_validation_data_where_there_are_such() -> None:
    def train(settings: Tuned, seed: int, advance: Advance) -> list[Point]:
        distance = abs(math.log2(settings["lr"]))
        return [Point(1, loss=-distance, error=0.5, bytes_sent=0, validation=distance)]

    outcome, _ = tune(Method("method", {}, train, start=0.25), Tuning(tries=4, seeds=[0]))
    assert outcome.settings == {"lr": 1.0}
    assert outcome.losses == [0.0]
    assert {attempt["score"] for attempt in outcome.to_dict()["tries"]} == {0.0, 1.0, 2.0}


def test_settings_that_name_a_learning_rate_are_tried_as_they_are() -> None:
    method = method_of(lambda s, seed: s["lr"], start=1.0, variants=[{"lr": 3.0}, {"lr": 2.0}])
    outcome, _ = tune(method, Tuning(tries=5, seeds=[0]))
    assert [run.settings["lr"] for run in outcome.tries] == [3.0, 2.0]
    assert outcome.settings == {"lr": 2.0}


def test_a_method_that_always_diverges_is_reported_as_such() -> None:
    outcome, runs = tune(method_of(lambda s, seed: math.nan, start=1.0), Tuning(3, [0, 1]))
    assert outcome.diverged
    assert (len(outcome.tries), len(outcome.runs), len(runs)) == (6, 1, 6)
    record = outcome.to_dict()
    assert record["mean_loss"] is None
    json.dumps(record, allow_nan=False)


def by_twos(tries: int = 3, seeds: Sequence[int] = range(3)) -> Tuning:
    return Tuning(tries, seeds, factor=2.0, more=4)


@given(luck=st.lists(st.floats(0.0, 2.0), min_size=27, max_size=27))
def test_the_best_mean_lies_between_two_others_where_that_is_asked_for(luck: list[float]) -> None:
    def loss(settings: Tuned, seed: int) -> float:
        place = round(math.log2(settings["lr"]))
        return abs(place) + luck[3 * (place % 9) + seed]

    outcome, runs = tune(method_of(loss, start=1.0), Tuning(5, range(3), factor=2.0, beside=True))
    means = {
        run.settings["lr"]: sum(loss(run.settings, seed) for seed in range(3)) / 3
        for run in runs
        if run.seed == 2
    }
    rates, chosen = sorted(means), outcome.settings["lr"]
    assert means[chosen] == min(means.values())
    assert rates[0] < chosen < rates[-1]


@given(best=st.floats(1e-5, 10.0), tries=st.integers(1, 6), seeds=st.integers(1, 4))
def test_every_method_is_tuned_by_the_same_rule_and_its_best_gets_all_seeds(
    best: float, tries: int, seeds: int
) -> None:
    method = method_of(lambda s, seed: abs(math.log(s["lr"] / best)) - seed, start=1e-3)
    outcome, runs = tune(method, by_twos(tries, range(seeds)))
    first = [run for run in runs if run.seed == 0]
    assert tries <= len(first) <= tries + 4
    assert tries < 3 or len(first) == tries + 4 or not outcome.is_at_edge
    chosen = min(first, key=lambda run: run.loss)
    assert [run.seed for run in outcome.runs] == list(range(seeds))
    assert {run.settings["lr"] for run in outcome.runs} == {chosen.settings["lr"]}
    assert len(runs) == len(first) + seeds - 1


@given(
    steps=st.lists(st.floats(0.0, 0.5), min_size=9, max_size=9),
    luck=st.lists(st.floats(0.0, 1.0), min_size=27, max_size=27),
)
def test_no_rate_that_may_be_better_is_left_out_for_the_luck_of_the_first_seed(
    steps: list[float], luck: list[float]
) -> None:
    def loss(settings: Tuned, seed: int) -> float:
        place = round(math.log2(settings["lr"] / 1e-3)) % 9
        return steps[place] + luck[3 * place + seed]

    outcome, runs = tune(method_of(loss, start=1e-3), by_twos())
    assert len(outcome.runs) == 3
    mean = statistics.mean(outcome.losses)
    for rate in {run.settings["lr"] for run in runs}:
        losses = [run.loss for run in runs if run.settings["lr"] == rate]
        assert (len(losses) == 1 and losses[0] >= mean) or statistics.mean(losses) >= mean


@pytest.mark.parametrize(
    ("losses", "others", "chosen"),
    [
        # On the first seed 8e-3 is the best; on the others it is far worse than its neighbour.
        ({4e-3: (0.9, 1.0), 8e-3: (0.8, 1.3), 2e-3: (0.99, 1.1)}, 2.0, 4e-3),
        # Where the means lead to the edge, the search goes on.
        ({4e-3: (0.9, 2.0), 2e-3: (1.0, 1.0), 1e-3: (0.95, 0.5), 5e-4: (1.2, 1.9)}, 3.0, 1e-3),
        ({4e-3: (0.9, 0.9), 8e-3: (math.inf, 1.0)}, 2.0, 4e-3),
    ],
)
def test_the_best_mean_counts(
    losses: dict[float, tuple[float, ...]], others: float, chosen: float
) -> None:
    def loss(settings: Tuned, seed: int) -> float:
        return losses[settings["lr"]][seed] if settings["lr"] in losses else others

    outcome, runs = tune(method_of(loss, start=4e-3), by_twos(seeds=range(2)))
    assert outcome.settings == {"lr": chosen}
    assert not outcome.is_at_edge
    assert all(runs.get(replace(run.spec, seed=0)) for run in runs)


def test_a_run_that_is_there_is_not_made_again() -> None:
    method = method_of(lambda s, seed: abs(math.log(s["lr"] / 2e-3)), start=1e-3)
    _, runs = tune(method, by_twos())
    assert by_twos().next(method, runs) == []
    assert [spec.seed for spec in by_twos(seeds=range(4)).next(method, runs)] == [3]
    elsewhere = replace(method, start=8e-3)
    assert by_twos().next(elsewhere, runs) == [], "tries count wherever they began"


@given(variants=st.integers(1, 4), tries=st.integers(3, 12), best=st.floats(-3, 3))
def test_all_methods_get_as_many_tries_however_many_variants_they_have(
    variants: int, tries: int, best: float
) -> None:
    """At most as many again go beyond the edges of the search."""

    def loss(settings: Tuned, seed: int) -> float:
        return abs(math.log2(settings["lr"]) - best) + settings["decay"]

    options = [{"decay": float(i)} for i in range(variants)]
    outcome, _ = tune(method_of(loss, start=1.0, variants=options), by_twos(tries, range(1)))
    assert tries <= len(outcome.tries) + variants * (variants > tries) <= tries + 8
    single = [
        decay
        for decay in range(variants)
        if sum(run.settings["decay"] == decay for run in outcome.tries) == 1
    ]
    assert len(single) >= variants - 1 or tries - variants + 1 < 3
    assert outcome.settings["decay"] == 0


def test_a_variant_that_leads_after_one_try_is_searched() -> None:
    """Its best rate is another than that of the first variant."""

    def loss(settings: Tuned, seed: int) -> float:
        best = 0.0 if settings["decay"] else 2.0
        return abs(math.log2(settings["lr"]) - best) - settings["decay"]

    options = [{"decay": 0.0}, {"decay": 5.0}, {"decay": -5.0}]
    outcome, _ = tune(method_of(loss, start=4.0, variants=options), by_twos(5, range(1)))
    assert outcome.settings == {"lr": 1.0, "decay": 5.0}
    made = [run.settings["lr"] for run in outcome.tries if run.settings["decay"] == 5.0]
    assert made == [0.5, 1.0, 2.0, 4.0, 8.0]
    assert not outcome.is_at_edge


def test_a_search_that_begins_lower_leaves_a_second_valley() -> None:
    """Its earlier runs lie between two others, and another variant has none at the new best."""

    def loss(settings: Tuned, seed: int) -> float:
        place = math.log2(settings["lr"])
        return min(abs(place), 2 + abs(place - 5)) - 0.1 * settings["decay"]

    options = [{"decay": 0.0}, {"decay": 1.0}]
    method = method_of(loss, start=32.0, variants=options)
    caught, runs = tune(method, by_twos(4, range(1)))
    assert caught.settings == {"lr": 32.0, "decay": 1.0}
    lower, tuning = replace(method, start=0.5), by_twos(4, range(1))
    while specs := tuning.next(lower, runs):
        for spec in specs:
            runs.add(lower.run(spec))
    outcome = tuning.outcome(lower, runs)
    assert outcome is not None
    assert outcome.settings == {"lr": 1.0, "decay": 1.0}
