"""Processes: a run that crashes, hangs or is interrupted says why and leaves nothing behind."""

import contextlib
import math
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest

from benchmarks.lab import events
from benchmarks.lab.events import Event
from benchmarks.lab.methods import parse_method
from benchmarks.lab.model import GPTConfig
from benchmarks.lab.processes import cause_of_failure, last_words, run_method
from benchmarks.lab.runs import Run, Settings

ENDLESS = Settings(
    steps=1_000_000, eval_every=1_000_000, model=GPTConfig(layers=1, width=16, heads=2, context=16)
)

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="looks at /proc")


class Ranks:
    """Watches a run's events: remembers the workers, and does something at the first step."""

    def __init__(self, at_first_step: Callable[["Ranks"], None]) -> None:
        self.pids: dict[int, int] = {}  # by rank
        self._at_first_step = at_first_step
        self._stepped = False

    def __call__(self, event: Event) -> None:
        if event["event"] == "process":
            self.pids[event["rank"]] = event["pid"]
        elif event["event"] == "step" and not self._stepped:
            self._stepped = True
            self._at_first_step(self)


def is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except FileNotFoundError:
        return False


def wait_until(condition: Callable[[], bool], seconds: float = 60) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.1)


def run_endless(tmp_path: Path, ranks: Ranks, timeout: float = 240) -> Run:
    corpus = tmp_path / "corpus"
    corpus.write_bytes(bytes(range(32, 127)) * 100)
    method = parse_method("all_reduce")
    return run_method(method, ENDLESS, corpus, tmp_path / "log", ranks, timeout=timeout)


@pytest.mark.slow
def test_a_rank_that_is_killed_is_named_and_the_others_end(tmp_path: Path) -> None:
    ranks = Ranks(lambda ranks: os.kill(ranks.pids[1], signal.SIGKILL))
    run = run_endless(tmp_path, ranks)
    assert run.figures is None
    assert run.failure == "rank 1 was ended by SIGKILL"
    assert len(ranks.pids) == 2
    assert not any(map(is_running, ranks.pids.values()))


@pytest.mark.slow
def test_ranks_that_hang_and_ignore_all_requests_are_killed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Ranks may take their time to start; once they are stopped, a second counts as a thousand.
    stopped = math.inf

    def monotonic() -> float:
        now = time.monotonic()
        return now + 1000 * max(0.0, now - stopped)

    # A stopped process answers neither the end of its input nor SIGTERM.
    def stop(ranks: Ranks) -> None:
        nonlocal stopped
        for pid in ranks.pids.values():
            os.kill(pid, signal.SIGSTOP)
        stopped = time.monotonic()

    monkeypatch.setattr(events, "time", SimpleNamespace(monotonic=monotonic, sleep=time.sleep))
    ranks = Ranks(stop)
    run = run_endless(tmp_path, ranks, timeout=240)
    assert run.failure == "hung: no progress for 240 s"
    assert len(ranks.pids) == 2
    assert not any(map(is_running, ranks.pids.values()))


@pytest.mark.slow
def test_an_interruption_ends_the_ranks_before_it_is_passed_on(tmp_path: Path) -> None:
    def interrupt(ranks: Ranks) -> None:
        raise KeyboardInterrupt

    ranks = Ranks(interrupt)
    with pytest.raises(KeyboardInterrupt):
        run_endless(tmp_path, ranks)
    assert len(ranks.pids) == 2
    assert not any(map(is_running, ranks.pids.values()))


@pytest.mark.slow
def test_ranks_end_when_the_launcher_is_killed(tmp_path: Path) -> None:
    script = f"""
import sys
from pathlib import Path
from tests.benchmarks.lab.test_processes import Ranks, run_endless
run_endless(Path({str(tmp_path)!r}), Ranks(lambda ranks: print(*ranks.pids.values(), flush=True)))
"""
    command = [sys.executable, "-c", script]
    environment = {**os.environ, "TMPDIR": str(tmp_path)}  # for what a killed process leaves
    with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE) as launcher:
        assert launcher.stdout is not None
        pids = [int(pid) for pid in launcher.stdout.readline().split()]
        assert len(pids) == 2
        assert all(map(is_running, pids))
        launcher.kill()
    wait_until(lambda: not any(map(is_running, pids)))


@pytest.mark.slow
def test_the_command_ends_its_processes_and_files_when_asked_to_end(tmp_path: Path) -> None:
    scratch, out = tmp_path / "scratch", tmp_path / "out"
    scratch.mkdir()

    def workers() -> list[str]:
        """The command lines of processes that use the scratch folder."""
        lines = []
        for process in Path("/proc").glob("[0-9]*/cmdline"):
            with contextlib.suppress(OSError):
                lines.append(process.read_text())
        return [line for line in lines if str(scratch) in line]

    arguments = ["--hooks", "all_reduce", "--quick", "--steps", "1000000", "--out", str(out)]
    with subprocess.Popen(
        [sys.executable, "-m", "benchmarks.compare", *arguments],
        env={**os.environ, "TMPDIR": str(scratch)},
        stderr=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        text=True,
    ) as process:
        wait_until(lambda: len(workers()) == 2)
        process.terminate()
        _, errors = process.communicate(timeout=60)
    assert process.returncode == 130
    assert errors == "python -m benchmarks.compare: interrupted, 0 of 1 methods finished\n"
    assert not workers()
    assert not list(scratch.glob("comm-hooks-*"))


def test_the_last_words_are_those_of_an_exception() -> None:
    log = """\
Traceback (most recent call last):
  File "worker.py", line 1, in <module>
torch.linalg.LinAlgError: singular
while exiting
"""
    assert last_words(log) == "torch.linalg.LinAlgError: singular"
    assert last_words("worker.py: error: unknown argument\n\n") == (
        "worker.py: error: unknown argument"
    )
    assert last_words("") == "the ranks ended without a word"


def test_the_cause_is_the_first_report_unless_a_signal_ended_a_silent_rank() -> None:
    aborted = {0: -signal.SIGABRT, 1: 1}
    assert cause_of_failure({}, aborted, "") == "rank 0 was ended by SIGABRT"
    assert cause_of_failure({1: "closed"}, aborted, "") == "rank 0 was ended by SIGABRT"
    assert cause_of_failure({1: "diverged", 0: "closed"}, aborted, "") == "diverged"
    assert cause_of_failure({}, {0: 1, 1: 0}, "ValueError: no") == "ValueError: no"
