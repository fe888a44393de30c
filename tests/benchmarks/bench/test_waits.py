"""How long until a loss."""

import pytest

from benchmarks.bench.results import Block, Candidate, Result, Timing
from benchmarks.bench.table import wait_rows_of
from benchmarks.bench.waits import halfway_loss, steps_until
from benchmarks.lab.runs import Figures, Point, Run, RunSpec


def curve(*losses: float) -> list[Point]:
    return [Point(10 * i, loss, 0.5, 0) for i, loss in enumerate(losses, start=1)]


def result(method: str, *losses: float, control: float = 200.0, own: float = 300.0) -> Result:
    figures = Figures(losses[-1], 1.0, 1.0, 1.0, 1, 1)
    run = Run(RunSpec(method, {}, {"lr": 0.1}, 0), curve(*losses), figures=figures)
    tuned, without = (Candidate(None, [Block(ms, 0.0, 0.0)] * 2) for ms in (own, control))
    return Result(run, [Timing("10mbit", 1e7, 1, without, [tuned])])


@pytest.mark.parametrize(
    ("losses", "steps"),
    [
        ((3.0, 2.0), 15.0),
        ((3.0, 2.5), 20.0),
        ((2.0, 1.0), 10.0),
        ((3.0, 2.6), None),
        # It counts when it stays.
        ((2.0, 3.0, 2.5, 2.0), 30.0),
        ((2.0, 3.0), None),
        ((), None),
    ],
)
def test_steps_until_a_loss(losses: tuple[float, ...], steps: float | None) -> None:
    assert steps_until(2.5, curve(*losses)) == steps


def test_halfway_needs_both_controls_and_a_gain() -> None:
    none, exact = result("none", 3.0), result("all_reduce", 2.0)
    assert halfway_loss([none, exact, result("sign", 1.0)]) == 2.5
    assert halfway_loss([none]) is None
    assert halfway_loss([exact]) is None
    assert halfway_loss([none, result("all_reduce", 3.0)]) is None
    failed = Result(Run(RunSpec("all_reduce", {}, {"lr": 0.1}, 0), failure="diverged"))
    assert halfway_loss([none, failed]) is None


def test_seconds_are_those_of_the_usual_machine() -> None:
    results = [
        result("sign", 3.0, 2.0, control=200.0, own=300.0),
        result("topk", 3.0, 2.0, control=1200.0, own=1300.0),  # timed while others were at work
        result("bf16", 3.0, 2.8),
    ]
    rows = wait_rows_of(results, ["10mbit", "1gbit"], 2.5)
    assert rows[2] == ["bf16", "-", "-", "-"]
    # 15 steps of 200 + 100 ms.
    assert rows[:2] == [["sign", "15", "4", "-"], ["topk", "15", "4", "-"]]
