"""Runs that are kept are not made again, and are what they were."""

from dataclasses import dataclass
from pathlib import Path

import pytest

from benchmarks.lab.kept_runs import KeptRuns
from benchmarks.lab.outcomes import Advance, Diverged, Method
from benchmarks.lab.runs import Point, Tuned
from tests.benchmarks.studying import nothing


@dataclass(frozen=True, kw_only=True)
class Costly(Point):
    cost: float


class Counting:
    """A method's training, which counts how often it is asked for."""

    def __init__(self) -> None:
        self.made = 0

    def __call__(self, settings: Tuned, seed: int, advance: Advance) -> list[Point]:
        self.made += 1
        points: list[Point] = [
            Costly(1, 1 / 3, 0.1, 8, 0.2, None, cost=settings["lr"]),
            Costly(2, seed + 0.1, 0.1, 16, cost=0.5),
        ]
        if settings["lr"] > 1:
            raise Diverged(*points[:1])
        return points


@pytest.mark.parametrize("lr", [1e-3, 0.1 + 0.2, 2.0])
def test_what_is_kept_is_what_was_made(tmp_path: Path, lr: float) -> None:
    train = Counting()
    method = Method("m", {"ratio": None, "K": 1}, train, start=1.0)
    file = tmp_path / "runs.jsonl"
    for seed in (0, 1):
        made = KeptRuns(file, {"steps": 2, "ratios": (1, 2)}, Costly).run(
            method, {"lr": lr}, seed, nothing
        )
        kept = KeptRuns(file, {"steps": 2, "ratios": (1, 2)}, Costly).run(
            method, {"lr": lr}, seed, nothing
        )
        assert kept == made
        assert made.diverged == (lr > 1)
        assert train.made == seed + 1


def test_whatever_differs_is_made_anew(tmp_path: Path) -> None:
    train, file = Counting(), tmp_path / "runs.jsonl"

    def run(study: dict[str, int], name: str, label: int, lr: float, seed: int) -> None:
        method = Method(name, {"K": label}, train, start=1.0)
        KeptRuns(file, study, Costly).run(method, {"lr": lr}, seed, nothing)

    first = ({"steps": 2}, "m", 1, 0.1, 0)
    others = [
        ({"steps": 3}, "m", 1, 0.1, 0),
        ({"steps": 2}, "n", 1, 0.1, 0),
        ({"steps": 2}, "m", 2, 0.1, 0),
        ({"steps": 2}, "m", 1, 0.2, 0),
        ({"steps": 2}, "m", 1, 0.1, 1),
    ]
    for each in (first, *others):
        run(*each)
    assert train.made == 6
    for each in (first, *others):
        run(*each)
    assert train.made == 6


def test_what_is_nobodys_run_is_left_out(tmp_path: Path) -> None:
    file = tmp_path / "runs.jsonl"
    file.write_text('7\nnull\n{}\n{"of": [{}]}\n{"of": [{}], "curve": [{"x": 1}]}\n[')
    assert KeptRuns(file, {}, Costly).count == 0


def test_what_they_took_is_added_up_whenever_they_were_made(tmp_path: Path) -> None:
    method = Method("m", {}, Counting(), start=1.0)
    first, second = (KeptRuns(tmp_path / "runs.jsonl", {}, Costly) for _ in range(2))
    first.run(method, {"lr": 0.1}, 0, nothing)
    again = KeptRuns(tmp_path / "runs.jsonl", {}, Costly)
    again.run(method, {"lr": 0.1}, 0, nothing)
    assert again.seconds == first.seconds > second.seconds == 0


def test_a_line_that_was_cut_off_is_made_again(tmp_path: Path) -> None:
    train, file = Counting(), tmp_path / "runs.jsonl"
    method = Method("m", {}, train, start=1.0)
    for seed in (0, 1):
        KeptRuns(file, {}, Costly).run(method, {"lr": 0.1}, seed, nothing)
    file.write_text(file.read_text()[:-9])
    kept = KeptRuns(file, {}, Costly)
    assert kept.count == 1
    for seed in (0, 1):
        kept.run(method, {"lr": 0.1}, seed, nothing)
    assert train.made == 3
    assert KeptRuns(file, {}, Costly).count == 2
