"""Records survive their file; what differs is made anew; a run follows from its seed."""

import json
import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from benchmarks.lab.outcomes import Advance, Diverged, Method
from benchmarks.lab.runs import Figures, Point, Run, RunSpec, RunStore, Tuned, mean_point, parse_run

SPEC = RunSpec("m", {"K": 1, "ratio": None}, {"lr": 0.1 + 0.2}, 0)
CURVE = [Point(1, 1 / 3, 0.1, 8, validation=0.2), Point(2, 0.1, 0.1, 16, epsilon=0.5)]
FIGURES = Figures(2.5, 1.0, 4.0, 4.0, 8, 8)


def test_what_is_kept_is_what_was_made(tmp_path: Path) -> None:
    store = RunStore(tmp_path / "runs.jsonl", {"steps": 2, "ratios": (1, 2)})
    runs = [
        Run(SPEC, CURVE, seconds=1.5),
        Run(replace(SPEC, seed=1), [], "diverged"),
        Run(replace(SPEC, seed=2), CURVE, figures=FIGURES, note="n", facts={"Text": "t"}),
    ]
    for run in runs:
        store.add(run)
    again = RunStore(store.file, {"steps": 2, "ratios": [1, 2]})
    assert list(again) == runs
    assert again.get(SPEC) == runs[0]
    assert again.get(replace(SPEC, seed=3)) is None
    assert len(RunStore(store.file, {"steps": 3})) == 0


@pytest.mark.parametrize(
    "other",
    [
        replace(SPEC, method="n"),
        replace(SPEC, labels={"K": 2, "ratio": None}),
        replace(SPEC, settings={"lr": 0.2}),
        replace(SPEC, seed=1),
    ],
)
def test_other_specifications_have_other_keys(other: RunSpec) -> None:
    assert other.key != SPEC.key
    assert replace(SPEC, labels={"ratio": None, "K": 1}).key == SPEC.key


def test_lines_that_are_no_record_are_left_out(tmp_path: Path) -> None:
    store = RunStore(tmp_path / "runs.jsonl")
    for seed in (0, 1):
        store.add(Run(replace(SPEC, seed=seed), CURVE))
    store.file.write_text('7\nnull\n{}\n{"spec": 1}\n' + store.file.read_text()[:-9])
    cut = RunStore(store.file)
    assert [run.seed for run in cut] == [0]
    cut.add(Run(replace(SPEC, seed=1), CURVE))
    assert len(RunStore(store.file)) == 2


def test_a_record_must_have_a_curve_or_a_failure() -> None:
    values = json.loads(Run(SPEC, CURVE).to_json())
    assert parse_run(values) == Run(SPEC, CURVE)
    with pytest.raises(ValueError, match="must have a curve"):
        parse_run({**values, "curve": []})
    with pytest.raises(ValueError, match="is not known"):
        parse_run({**values, "other": 1})


def test_a_run_that_failed_is_infinitely_bad() -> None:
    failed = Run(SPEC, CURVE, "diverged")
    assert (failed.loss, failed.score, failed.error) == (math.inf, math.inf, 1.0)
    assert (Run(SPEC, CURVE[:1]).score, Run(SPEC, CURVE).score) == (0.2, 0.1)


def test_means_are_of_the_values_that_are_known() -> None:
    mean = mean_point([Point(3, 1.0, 0.0, 4, validation=2.0), Point(3, 2.0, 1.0, 8)])
    assert mean == Point(3, 1.5, 0.5, 6, validation=2.0)


def with_dropout(settings: Tuned, seed: int, advance: Advance) -> list[Point]:
    kept = float(torch.nn.functional.dropout(torch.ones(1000)).mean())
    if settings["lr"] > 1:
        raise Diverged(Point(1, kept, 0.5, 8))
    return [Point(1, kept, 0.5, 8)]


def test_dropout_follows_from_the_seed_and_leaves_the_generator_alone() -> None:
    method = Method("m", {}, with_dropout, start=1.0)
    runs = []
    for lr, seed in ((0.1, 0), (2.0, 0), (0.1, 1), (0.1, 0)):
        before = torch.get_rng_state()
        runs.append(method.run(method.spec({"lr": lr}, seed)))
        assert torch.equal(torch.get_rng_state(), before)
        torch.rand(1)
    assert [run.failure for run in runs] == [None, "diverged", None, None]
    losses = [run.curve[0].loss for run in runs]
    assert losses[0] == losses[1] == losses[3] != losses[2]
