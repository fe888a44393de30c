"""The executor with real processes: starts a process per rank, watches them, and ends all of them.

Each method gets processes of its own, so that one which crashes or hangs costs its own row of the
table and nothing else.
"""

import contextlib
import json
import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.multiprocessing.spawn import spawn

from benchmarks.lab.events import Event, EventReader, StalledError
from benchmarks.lab.methods import Pair
from benchmarks.lab.runs import Figures, Point, Run, RunSpec, Settings
from benchmarks.netns import NetnsError, Testbed

PYTHON = (sys.executable,)
"""Starts Python for the ranks."""

_GRACE_SECONDS = 5.0
_EXCEPTION = re.compile(r"([\w.]*(?:Error|Exception)\b.*)")

Watch = Callable[[Event], None]
Start = Callable[..., "subprocess.Popen[bytes]"]
"""Starts a command for a rank, with options of ``Popen``."""


def new_run(pair: Pair, settings: Settings) -> Run:
    """Return the record of a run that has not begun."""
    labels = json.loads(json.dumps(asdict(settings)))
    seed, lr = labels.pop("seed"), labels.pop("learning_rate")
    return Run(RunSpec(pair.spec, labels, {"lr": lr}, seed), note=pair.note)


def run_method(
    pair: Pair, settings: Settings, corpus: Path, log: Path, watch: Watch, *, timeout: float
) -> Run:
    """Train with a method in ``settings.nproc`` processes and return the record.

    Args:
        pair: the method.
        settings: shared with the other methods.
        corpus: the file with the text.
        log: takes the output of the processes.
        watch: called with each event as it happens.
        timeout: seconds without any event after which the run counts as hung.

    Returns:
        The record, with ``failure`` set if the run crashed, hung or diverged.
    """
    run = new_run(pair, settings)
    with started("benchmarks.lab.worker", pair, settings, corpus, log) as job:
        failure = job.observe(run, watch, timeout=timeout)
    if run.figures is None:
        run.failure = failure
    return run


@dataclass
class Job:
    """The processes of a method, one for each rank."""

    processes: "list[subprocess.Popen[bytes]]"
    log: Path
    events: EventReader

    def is_running(self) -> bool:
        """Return whether to wait for more: none has failed and not all have ended."""
        codes = [process.poll() for process in self.processes]
        return None in codes and not any(codes)

    def observe(
        self, run: Run, watch: Watch, *, timeout: float, also: Watch = lambda event: None
    ) -> str:
        """Put the events of the ranks into the record until they have ended; return the failure.

        Args:
            run: the record.
            watch: called with each event as it happens.
            timeout: seconds without any event after which the ranks count as hung.
            also: called with each event before that, to do what it asks for.
        """
        reasons: dict[int, str] = {}  # of each rank that reported a failure, in their order
        try:
            for event in self.events.follow(self.is_running, timeout):
                values = {key: value for key, value in event.items() if key != "event"}
                if event["event"] == "point":
                    run.curve.append(Point(**values))
                elif event["event"] == "figures":
                    run.figures = Figures(**values)
                elif event["event"] == "error":
                    reasons[values["rank"]] = values["reason"]
                also(event)
                watch(event)
        except StalledError as error:
            return str(error)
        codes = {rank: process.poll() or 0 for rank, process in enumerate(self.processes)}
        return cause_of_failure(reasons, codes, self.log.read_text(errors="replace"))


@contextlib.contextmanager
def started(
    module: str,
    pair: Pair,
    settings: Settings,
    corpus: Path,
    log: Path,
    start: Start | None = None,
    **arguments: object,
) -> Iterator[Job]:
    """Start a worker for each rank; on leaving, all are gone, whatever happens in between.

    Args:
        module: of the worker.
        pair, settings, corpus, log: see :func:`run_method`.
        start: starts a process; by default on this machine.
        arguments: more options of the worker.
    """
    with tempfile.TemporaryDirectory(prefix="comm-hooks-") as scratch, log.open("wb") as output:
        line = json.dumps(asdict(settings))
        options = {"method": pair.spec, "settings": line, "corpus": corpus, "folder": scratch}
        options |= {name.replace("_", "-"): value for name, value in arguments.items()}
        command = [*PYTHON, "-m", module, *(f"--{key}={each}" for key, each in options.items())]
        with contextlib.closing(EventReader(Path(scratch))) as events:
            job = Job([], log, events)
            try:
                for rank in range(settings.nproc):
                    process = (start or _start_here(settings.nproc))(
                        rank,
                        command,
                        bufsize=0,
                        stdin=subprocess.PIPE,  # its end tells the worker that we are gone
                        stdout=output,
                        stderr=subprocess.STDOUT,
                    )
                    job.processes.append(process)
                yield job
            finally:
                _stop(job.processes)


def _start_here(ranks: int) -> Start:
    # Left alone, gloo looks up the host's own name, which fails or takes seconds on machines whose
    # name does not resolve.
    loopback = [name for _, name in socket.if_nameindex() if name.startswith("lo")]
    environment = {**os.environ, "OMP_NUM_THREADS": threads_per_rank(ranks)}
    if loopback:
        environment.setdefault("GLOO_SOCKET_IFNAME", loopback[0])

    def start(rank: int, command: list[str], **options: Any) -> "subprocess.Popen[bytes]":
        own = {**environment, "RANK": str(rank)}
        # In a session of its own: Ctrl-C is the launcher's to handle.
        return subprocess.Popen(command, env=own, start_new_session=True, **options)

    return start


def _stop(processes: "list[subprocess.Popen[bytes]]") -> None:
    """End all processes: first ask them, then kill those that do not answer."""
    try:
        for process in processes:
            assert process.stdin is not None
            process.stdin.close()
            process.terminate()
        for process in processes:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(_GRACE_SECONDS)
    finally:
        for process in processes:
            process.kill()
            process.wait()


def lines_from_testbed(ranks: int, rate: str, module: str, *arguments: object) -> Iterator[str]:
    """Run a module's ``worker`` once per rank on capped links; yield the lines of rank 0.

    Raises:
        NetnsError: where there can be no such network, and if a rank failed.
    """
    command = [sys.executable, "-W", "ignore", "-m", module, "worker", *map(str, arguments)]
    options: dict[str, Any] = {"stdout": subprocess.PIPE, "text": True}
    with Testbed(ranks, rate=rate) as bed:
        workers = [bed.start(rank, command, **options) for rank in range(ranks)]
        assert workers[0].stdout
        for line in workers[0].stdout:
            yield line.rstrip()
        if any(bed.wait(workers, timeout=60)):
            raise NetnsError(f"one of {ranks} ranks failed at {rate}")


def spawn_ranks(ranks: int, work: Callable[..., Any], *arguments: Any) -> list[Any]:
    """Return the results of ``work(*arguments)`` on each rank, in processes joined by gloo.

    Args:
        ranks: how many.
        work: a function of a module; returns tensors, numbers, and lists and dicts of them.
        arguments: are pickled.
    """
    with tempfile.TemporaryDirectory() as folder:
        spawn(_serve, (ranks, folder, work, arguments), nprocs=ranks)
        return [torch.load(Path(folder, f"{rank}.pt"), weights_only=True) for rank in range(ranks)]


def _serve(
    rank: int, ranks: int, folder: str, work: Callable[..., Any], arguments: tuple[Any, ...]
) -> None:
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/store", rank=rank, world_size=ranks
    )
    torch.save(work(*arguments), Path(folder, f"{rank}.pt"))
    dist.destroy_process_group()


def available_cores() -> int:
    """Return the number of cores this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def threads_per_rank(nproc: int) -> str:
    """Return the ``OMP_NUM_THREADS`` of the workers: the user's, or a fair share of the cores."""
    return os.environ.get("OMP_NUM_THREADS") or str(max(1, available_cores() // nproc))


def cause_of_failure(reasons: Mapping[int, str], codes: Mapping[int, int], log: str) -> str:
    """Return why a run failed.

    A process that is killed (out of memory, a crash in native code) cannot report so, and the
    reports of the others, that the connection is gone, hide the cause. A rank that reported an
    error first and was ended by a signal on its way out has given the cause.

    Args:
        reasons: reported by ranks, in their order.
        codes: of the processes, by rank; negative for signals.
        log: their output.
    """
    for rank, code in codes.items():
        if code < 0 and rank not in reasons:
            return f"rank {rank} was ended by {signal.Signals(-code).name}"
    # The first to fail; the others then complain of a closed connection.
    return next(iter(reasons.values()), None) or last_words(log)


def last_words(log: str) -> str:
    """Return the line of a failed run's output that says most: the last exception, if any."""
    lines = [line for line in log.splitlines() if line.strip()]
    exceptions = [found[1] for line in lines if (found := _EXCEPTION.match(line))]
    return (exceptions or lines or ["the ranks ended without a word"])[-1]
