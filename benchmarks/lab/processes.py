"""Start ranks in processes of their own, watch them, and never leave one behind.

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
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.multiprocessing.spawn import spawn

from benchmarks.lab.events import Event, EventReader, StalledError
from benchmarks.lab.methods import Method
from benchmarks.lab.runs import Figures, Point, Run, Settings
from benchmarks.netns import NetnsError, Testbed

TORCHRUN = (sys.executable, "-m", "torch.distributed.run")

_GRACE_SECONDS = 5.0


def run_method(
    method: Method,
    settings: Settings,
    corpus: Path,
    log: Path,
    watch: Callable[[Event], None],
    *,
    timeout: float,
) -> Run:
    """Train with ``method`` in ``settings.nproc`` processes and return the record.

    Args:
        method: what to run.
        settings: what it shares with the other methods.
        corpus: the file with the text.
        log: where the output of the processes goes.
        watch: called with each event as it happens.
        timeout: seconds without any event after which the run counts as hung.

    Returns:
        The record, with ``failure`` set if the run crashed, hung or diverged.
    """
    run = Run(method.spec, method.note, settings)
    arguments = {"method": method.spec, "settings": settings.to_json(), "corpus": str(corpus)}
    with _torchrun(settings.nproc, log, arguments) as job:
        failure = job.observe(run, watch, timeout=timeout)
    if run.figures is None:
        run.failure = failure
    return run


@dataclass
class Job:
    """The processes of a method: one torchrun, or one for each rank.

    Args:
        processes: that were started.
        logs: where the output of each goes.
        events: what the ranks tell.
    """

    processes: "list[subprocess.Popen[bytes]]"
    logs: list[Path]
    events: EventReader
    workers: list[int] = field(default_factory=list)  # process ids of the ranks

    def is_running(self) -> bool:
        """Tell whether to wait for more: none has failed and not all have ended."""
        codes = [process.poll() for process in self.processes]
        return None in codes and not any(codes)

    def observe(
        self,
        run: Run,
        watch: Callable[[Event], None],
        *,
        timeout: float,
        also: Callable[[Event], None] = lambda event: None,
    ) -> str:
        """Put what the ranks tell into the record until they have ended; return why they failed.

        Args:
            run: the record.
            watch: called with each event as it happens.
            timeout: seconds without any event after which they count as hung.
            also: called with each event before that, to do what it asks for.
        """
        told: dict[int, str] = {}  # what each rank that failed said, first things first
        try:
            for event in self.events.follow(self.is_running, timeout):
                values = {key: value for key, value in event.items() if key != "event"}
                if event["event"] == "process":
                    self.workers.append(values["pid"])
                elif event["event"] == "point":
                    run.curve.append(Point(**values))
                elif event["event"] == "figures":
                    run.figures = Figures(**values)
                elif event["event"] == "error":
                    told[values["rank"]] = values["reason"]
                also(event)
                watch(event)
        except StalledError as error:
            return str(error)
        # Those that failed first: others are about to complain of closed connections.
        failed = [
            log for process, log in zip(self.processes, self.logs, strict=True) if process.poll()
        ]
        outputs = [log.read_text(errors="replace") for log in failed or self.logs]
        return cause_of_failure(told, next(filter(find_killed_rank, outputs), outputs[0]))


def worker_command(package: str, arguments: Mapping[str, str]) -> list[str]:
    """Return the end of a command line that runs a package's worker with these options."""
    options = [f"--{name}={value}" for name, value in arguments.items()]
    return ["-m", f"benchmarks.{package}.worker", *options]


@contextlib.contextmanager
def _torchrun(nproc: int, log: Path, arguments: Mapping[str, str]) -> Iterator[Job]:
    """Start torchrun and its workers; on leaving, all are gone, whatever happens in between."""
    with tempfile.TemporaryDirectory(prefix="comm-hooks-") as scratch, log.open("wb") as output:
        path = Path(scratch, "events.jsonl")
        options = ["--standalone", "--nproc-per-node", str(nproc), "--log-dir", scratch]
        arguments = {**arguments, "events": str(path)}
        with contextlib.closing(EventReader(path)) as events:
            torchrun = subprocess.Popen(
                [*TORCHRUN, *options, *worker_command("lab", arguments)],
                env=_environment(nproc),
                stdin=subprocess.PIPE,  # the workers' sign that we live
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,  # Ctrl-C is ours to handle, not torchrun's
            )
            job = Job([torchrun], [log], events)
            try:
                yield job
            finally:
                _stop(torchrun, job.workers)


def _stop(torchrun: "subprocess.Popen[bytes]", workers: list[int]) -> None:
    """End all processes: ask torchrun, which ends its workers; kill what does not listen."""
    assert torchrun.stdin is not None
    torchrun.stdin.close()
    torchrun.terminate()
    try:
        with contextlib.suppress(subprocess.TimeoutExpired):
            torchrun.wait(_GRACE_SECONDS)
    finally:
        if torchrun.poll() is None:
            # Workers first: they have sessions of their own, so the end of torchrun would set them
            # free, and as long as it lives their process ids cannot belong to anyone else. It ends
            # by itself when they have.
            for pid in workers:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            with contextlib.suppress(subprocess.TimeoutExpired):
                torchrun.wait(_GRACE_SECONDS)
            torchrun.kill()
            torchrun.wait()


def lines_from_bed(ranks: int, rate: str, module: str, *arguments: object) -> Iterator[str]:
    """Run a module, found as from here, once per rank on capped links; yield what rank 0 prints.

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
    """Return what ``work(*arguments)`` returns on each rank, in processes joined by gloo.

    Args:
        ranks: how many.
        work: a function of a module; returns tensors, numbers, and lists and dicts of them.
        arguments: what can be pickled.
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
