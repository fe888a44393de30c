"""What of a time is another load's."""

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from benchmarks.lab import clock
from benchmarks.lab.clock import Starvation, quartile_range, starved_seconds


def compute(seconds: float) -> None:
    """Keep a processor busy until this thread had it for so long."""
    until = time.thread_time() + seconds
    while time.thread_time() < until:
        pass


@pytest.fixture
def _one_core() -> Iterator[None]:
    if starved_seconds() is None:
        pytest.skip("this system does not say how long threads wait for a processor")
    allowed = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {min(allowed)})  # the children's, too
    yield
    os.sched_setaffinity(0, allowed)


@pytest.mark.usefixtures("_one_core")
def test_waiting_for_a_core_that_others_have() -> None:
    others = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(3)]
    try:
        starvation = Starvation()
        compute(0.1)
        crowded = starvation.share()
    finally:
        for other in others:
            other.kill()
            other.wait()
    assert crowded > 0.4  # of four that share a core each waits for three quarters of the time


def test_sleeping_is_not_waiting_for_a_core() -> None:
    starvation = Starvation()
    time.sleep(0.3)
    assert starvation.share() < 0.5  # however busy the machine: nothing wanted to run


def test_a_system_that_does_not_tell(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(clock, "_SCHEDSTAT", tmp_path / "missing")
    assert starved_seconds() is None
    assert Starvation().share() == 0.0
    (tmp_path / "other").write_text("unheard of\n")
    monkeypatch.setattr(clock, "_SCHEDSTAT", tmp_path / "other")
    assert starved_seconds() is None


def test_the_share_is_that_of_the_time_since(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    told = tmp_path / "schedstat"
    told.write_text("5 1000000000 7\n")
    monkeypatch.setattr(clock, "_SCHEDSTAT", told)
    starvation = Starvation()
    told.write_text("5 1000000000000 7\n")
    assert starvation.share() == 1.0
    told.write_text("5 1000000000 7\n")
    assert starvation.share() == 0.0


def test_what_one_busy_moment_spoilt_does_not_count() -> None:
    assert quartile_range([0.2]) == 0
    assert quartile_range([1.0, 1.0, 1.0, 1.0, 1861.0]) == 0
    assert quartile_range([355.0, 1861.0] * 5) == 1861 - 355
