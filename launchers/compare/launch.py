"""Run one method under torchrun, watch it, and never leave a process behind.

Each method gets processes of its own, so that one which crashes or hangs costs its own row of the
table and nothing else.
"""

import contextlib
import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from types import TracebackType

from comm_hooks.launchers.compare.events import Event, EventReader, StalledError
from comm_hooks.launchers.compare.methods import Method
from comm_hooks.launchers.compare.runs import Figures, Point, Run, Settings

_GRACE_SECONDS = 5.0
_TORCHRUN = (sys.executable, "-m", "torch.distributed.run")


def run_method(
    method: Method,
    settings: Settings,
    corpus: Path,
    log: Path,
    stall_timeout: float,
    watch: Callable[[Event], None],
) -> Run:
    """Train with ``method`` in ``settings.nproc`` processes and return the record.

    Args:
        method: what to run.
        settings: what it shares with the other methods.
        corpus: the file with the text.
        log: where the output of the processes goes.
        stall_timeout: seconds without any event after which the run counts as hung.
        watch: called with each event as it happens.

    Returns:
        The record, with ``failure`` set if the run crashed, hung or diverged.
    """
    run = Run(method.spec, method.note, settings)
    told: dict[int, str] = {}  # what each worker that failed said, first things first
    hung = None
    with (
        tempfile.TemporaryDirectory(prefix="comm-hooks-") as scratch,
        _Job(method, settings, corpus, log, Path(scratch)) as job,
    ):
        try:
            for event in job.events.follow(job.is_running, stall_timeout):
                job.notice(event)
                record_event(run, told, event)
                watch(event)
        except StalledError as error:
            hung = str(error)
    if run.figures is None:
        output = log.read_text(errors="replace")
        run.failure = hung or cause_of_failure(told, output)
    return run


def record_event(run: Run, told: dict[int, str], event: Event) -> None:
    """Put what an event says into the record, or, if a rank failed, what it said of that."""
    values = {key: value for key, value in event.items() if key != "event"}
    if event["event"] == "point":
        run.curve.append(Point(**values))
    elif event["event"] == "figures":
        run.figures = Figures(**values)
    elif event["event"] == "error":
        told[values["rank"]] = values["reason"]


class _Job:
    """A torchrun and its workers: started on entry, gone on exit, whatever happens in between."""

    def __init__(
        self, method: Method, settings: Settings, corpus: Path, log: Path, scratch: Path
    ) -> None:
        events = scratch / "events.jsonl"
        self.events = EventReader(events)
        # fmt: off
        command = [
            *_TORCHRUN,
            "--standalone", "--nproc-per-node", str(settings.nproc), "--log-dir", str(scratch),
            "-m", "comm_hooks.launchers.compare.worker",
            "--method", method.spec, "--settings", settings.to_json(),
            "--corpus", str(corpus), "--events", str(events),
        ]
        # fmt: on
        with log.open("wb") as output:
            self._torchrun = subprocess.Popen(
                command,
                env=_environment(settings.nproc),
                stdin=subprocess.PIPE,  # the workers' sign that we live
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,  # Ctrl-C is ours to handle, not torchrun's
            )
        self._workers: list[int] = []

    def is_running(self) -> bool:
        return self._torchrun.poll() is None

    def notice(self, event: Event) -> None:
        """Remember the workers, in case they have to be killed."""
        if event["event"] == "process":
            self._workers.append(event["pid"])

    def __enter__(self) -> "_Job":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        try:
            self._stop()
        finally:
            self.events.close()

    def _stop(self) -> None:
        """End all processes: ask torchrun, which ends its workers; kill what does not listen."""
        assert self._torchrun.stdin is not None
        self._torchrun.stdin.close()
        self._torchrun.terminate()
        try:
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._torchrun.wait(_GRACE_SECONDS)
        finally:
            if self.is_running():
                self._kill()

    def _kill(self) -> None:
        # Workers first: they have sessions of their own, so the end of torchrun would set them
        # free, and as long as it lives their process ids cannot belong to anyone else. It ends by
        # itself when they have.
        for pid in self._workers:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._torchrun.wait(_GRACE_SECONDS)
        self._torchrun.kill()
        self._torchrun.wait()


def available_cores() -> int:
    """Return the number of cores this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def threads_per_rank(nproc: int) -> str:
    """Return the ``OMP_NUM_THREADS`` that the workers get: the user's, or a fair share."""
    return os.environ.get("OMP_NUM_THREADS") or str(max(1, available_cores() // nproc))


def _environment(nproc: int) -> dict[str, str]:
    environment = {**os.environ, "OMP_NUM_THREADS": threads_per_rank(nproc)}
    # Left alone, gloo looks up the host's own name, which fails or takes seconds on machines whose
    # name does not resolve.
    loopback = [name for _, name in socket.if_nameindex() if name.startswith("lo")]
    if loopback:
        environment.setdefault("GLOO_SOCKET_IFNAME", loopback[0])
    return environment


_TORCHRUN_SPEAKS = re.compile(r"^[IWEF]\d{4} .*torch/distributed/elastic/", re.MULTILINE)
_KILLED = re.compile(r"Root Cause.*?rank +: (\d+).*?Signal \d+ \((\w+)\)", re.DOTALL)
_EXCEPTION = re.compile(r"(?:\[rank\d+\]: )?([\w.]*(?:Error|Exception)\b.*)")


def cause_of_failure(told: dict[int, str], log: str) -> str:
    """Return why a run failed, from what its ranks told before they ended and its output.

    A process that is killed (out of memory, a crash in native code) cannot say so itself, and what
    the others then say, that the connection is gone, hides the cause. One that told its error first
    and was ended by a signal on its way out (native threads may abort a process that leaves a
    collective unfinished) has given the cause.
    """
    killed = find_killed_rank(log)
    if killed is not None and killed[0] not in told:
        return f"rank {killed[0]} was ended by {killed[1]}"
    # The first to fail; the others then complain of a closed connection.
    return next(iter(told.values()), None) or last_words(log)


def find_killed_rank(log: str) -> tuple[int, str] | None:
    """Return which rank a signal ended, and which signal, by torchrun's account, if one did."""
    killed = _KILLED.search(log)
    return (int(killed[1]), killed[2]) if killed else None


def last_words(log: str) -> str:
    """Return the line of a failed run's output that says most: the last exception, if any."""
    workers = _TORCHRUN_SPEAKS.split(log, maxsplit=1)[0]
    lines = [line for line in workers.splitlines() if line.strip()] or log.splitlines()
    exceptions = [found[1] for line in lines if (found := _EXCEPTION.match(line))]
    return (exceptions or lines or ["torchrun ended without a word"])[-1]
