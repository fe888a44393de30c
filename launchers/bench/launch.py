"""Run one method in a network of its own, and set its rates when the ranks are ready for them."""

import contextlib
import subprocess
import tempfile
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from comm_hooks.launchers.bench.rates import UNSHAPED
from comm_hooks.launchers.bench.results import Result, Timing
from comm_hooks.launchers.lab import processes
from comm_hooks.launchers.lab.events import Event, EventReader, StalledError
from comm_hooks.launchers.lab.methods import Method
from comm_hooks.launchers.lab.plain import rebuild
from comm_hooks.launchers.lab.processes import (
    cause_of_failure,
    find_killed_rank,
    record_event,
    worker_command,
)
from comm_hooks.launchers.lab.runs import Run, Settings
from comm_hooks.launchers.netns import Bed, NetnsError


def run_method(
    method: Method,
    settings: Settings,
    rates: list[str],
    timing_steps: int,
    corpus: Path,
    log: Path,
    watch: Callable[[Event], None],
    *,
    timeout: float,
) -> Result:
    """Train with ``method``, each rank in a network namespace, then time it at each rate.

    Args:
        method: what to run.
        settings: what it shares with the other methods.
        rates: of the links, ``none`` for no cap.
        timing_steps: steps at each rate.
        corpus: the file with the text.
        log: where the output of rank 0 goes; that of rank r goes to a file next to it.
        watch: called with each event as it happens.
        timeout: seconds without any event after which the method counts as hung.

    Returns:
        What was measured; the run has a ``failure`` if a rank failed or hung, also if that was
        after the training.
    """
    result = Result(Run(method.spec, method.note, settings))
    told: dict[int, str] = {}
    logs = [log, *(log.with_suffix(f".rank{rank}.log") for rank in range(1, settings.nproc))]
    arguments = {
        "method": method.spec,
        "settings": settings.to_json(),
        "rates": ",".join(rates),
        "timing-steps": str(timing_steps),
        "corpus": str(corpus),
    }
    try:
        with _start(settings.nproc, logs, arguments) as job:
            for event in job.events.follow(job.is_running, timeout):
                if event["event"] == "rate":
                    job.set_rate(event["rate"])
                elif event["event"] == "timing":
                    values = {key: value for key, value in event.items() if key != "event"}
                    result.timings.append(rebuild(Timing, values))
                else:
                    record_event(result.run, told, event)
                watch(event)
            # Those that failed first: others are about to complain of closed connections.
            failed = job.failed_ranks()
    except (StalledError, NetnsError) as error:
        result.run.failure = str(error)
    else:
        if result.run.figures is None or len(result.timings) < len(rates):
            outputs = [logs[rank].read_text(errors="replace") for rank in failed] or [""]
            killed = next((each for each in outputs if find_killed_rank(each)), outputs[0])
            result.run.failure = cause_of_failure(told, killed)
    return result


class _Job:
    """The ranks of a method in their network."""

    def __init__(
        self, bed: Bed, ranks: "list[subprocess.Popen[bytes]]", events: EventReader
    ) -> None:
        self.events = events
        self._bed = bed
        self._ranks = ranks

    def is_running(self) -> bool:
        """Tell whether to wait for more: no rank has failed and not all have ended."""
        codes = [rank.poll() for rank in self._ranks]
        return None in codes and not any(codes)

    def failed_ranks(self) -> list[int]:
        """Return the ranks that have ended other than well."""
        return [rank for rank, process in enumerate(self._ranks) if process.poll()]

    def set_rate(self, rate: str) -> None:
        """Set the rate of all links and let the ranks go on."""
        self._bed.set_rate(None if rate == UNSHAPED else rate)
        for rank in self._ranks:
            assert rank.stdin
            # A rank that has failed is noticed by what it told, or by its end.
            with contextlib.suppress(BrokenPipeError):
                rank.stdin.write(b"\n")


@contextlib.contextmanager
def _start(nproc: int, logs: list[Path], arguments: Mapping[str, str]) -> Iterator[_Job]:
    """Make a network and start a torchrun in each namespace; on leaving, both are gone."""
    with tempfile.TemporaryDirectory(prefix="comm-hooks-") as scratch:
        path = Path(scratch, "events.jsonl")
        worker = worker_command("comm_hooks.launchers.bench.worker", {**arguments, "events": path})
        with contextlib.closing(EventReader(path)) as events, Bed(nproc) as bed:
            ranks = []
            for rank, log in enumerate(logs):
                with log.open("wb") as output:
                    streams: dict[str, Any] = {"stdout": output, "stderr": subprocess.STDOUT}
                    streams["stdin"] = subprocess.PIPE  # for the worker, see its module
                    environment = {**bed.environment(rank), "PET_LOG_DIR": scratch}
                    ranks.append(
                        bed.start(
                            rank,
                            [*processes.TORCHRUN, *worker],
                            environment=environment,
                            bufsize=0,
                            **streams,
                        )
                    )
            yield _Job(bed, ranks, events)
