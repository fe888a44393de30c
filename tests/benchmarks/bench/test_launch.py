"""Ranks in a network that fail or hang: why is said, and what was measured before is kept."""

import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from benchmarks.bench import launch
from benchmarks.bench.results import Result
from benchmarks.lab.events import Event
from benchmarks.lab.methods import parse_method
from benchmarks.lab.model import GPTConfig
from benchmarks.lab.runs import Settings
from benchmarks.netns import why_not
from tests.benchmarks.lab.test_processes import is_running

pytestmark = [
    pytest.mark.skipif(bool(why_not()), reason=why_not() or ""),
    pytest.mark.timeout(600),
]

SETTINGS = Settings(
    steps=2, warmup=1, model=GPTConfig(layers=1, width=16, heads=2, context=16), eval_windows=2
)


def run(tmp_path: Path, timeout: float, watch: Callable[[Event], None]) -> Result:
    corpus = tmp_path / "corpus"
    corpus.write_bytes(bytes(range(32, 127)) * 10)
    method, rates = parse_method("sign"), ["none", "10mbit"]
    return launch.run_method(
        method, SETTINGS, rates, 2, corpus, tmp_path / "0.log", watch, timeout=timeout
    )


@pytest.mark.slow
def test_a_rank_that_is_killed_between_two_rates_is_named(tmp_path: Path) -> None:
    pids: dict[int, int] = {}

    def watch(event: Event) -> None:
        if event["event"] == "process":
            pids[event["rank"]] = event["pid"]
        elif event["event"] == "timing":
            os.kill(pids[1], signal.SIGKILL)

    result = run(tmp_path, 300, watch)
    assert result.run.failure == "rank 1 was ended by SIGKILL"
    assert result.run.figures is not None
    assert [timing.rate for timing in result.timings] == ["none"]
    assert len(pids) == 2
    assert not any(map(is_running, pids.values()))


@pytest.mark.parametrize(
    ("script", "failure"),
    [
        ("import time; time.sleep(1000)", "hung: no progress for 0.5 s"),
        (
            "import os, sys, time; os.environ['RANK'] == '0' and time.sleep(1000); "
            "sys.exit('no disk')",
            "no disk",
        ),
    ],
)
def test_ranks_that_say_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, script: str, failure: str
) -> None:
    monkeypatch.setattr(launch.processes, "PYTHON", (sys.executable, "-c", script))
    timeout = 0.5 if "hung" in failure else 60
    result = run(tmp_path, timeout, lambda event: None)
    assert result.run.failure == failure
    assert result.run.figures is None


def test_links_that_cannot_be_made_cost_the_row(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*arguments: object, **options: object) -> None:
        raise launch.NetnsError("tc: no such device")

    monkeypatch.setattr(launch.Testbed, "set_rate", refuse)
    assert run(tmp_path, 60, lambda event: None).run.failure == "tc: no such device"
