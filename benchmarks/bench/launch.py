"""Run one method in a network of its own, and set its rates when the ranks are ready for them."""

import contextlib
import subprocess
import tempfile
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

from benchmarks.bench.rates import UNSHAPED
from benchmarks.bench.results import Result, Timing
from benchmarks.lab import processes
from benchmarks.lab.events import Event, EventReader
from benchmarks.lab.methods import Method
from benchmarks.lab.plain import rebuild
from benchmarks.lab.runs import Run, Settings
from benchmarks.netns import NetnsError, Testbed


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
    logs = [log, *(log.with_suffix(f".rank{rank}.log") for rank in range(1, settings.nproc))]
    arguments = {
        "method": method.spec,
        "settings": settings.to_json(),
        "rates": ",".join(rates),
        "timing-steps": str(timing_steps),
        "corpus": str(corpus),
    }
    try:
        with _start(logs, arguments) as (job, bed):

            def also(event: Event) -> None:
                if event["event"] == "rate":
                    _set_rate(bed, job, event["rate"])
                elif event["event"] == "timing":
                    values = {key: value for key, value in event.items() if key != "event"}
                    result.timings.append(rebuild(Timing, values))

            failure = job.observe(result.run, watch, timeout=timeout, also=also)
    except NetnsError as error:
        failure = str(error)
    if result.run.figures is None or len(result.timings) < len(rates):
        result.run.failure = failure
    return result


def _set_rate(bed: Testbed, job: processes.Job, rate: str) -> None:
    """Set the rate of all links and let the ranks go on."""
    bed.set_rate(None if rate == UNSHAPED else rate)
    for rank in job.processes:
        assert rank.stdin
        # A rank that has failed is noticed by what it told, or by its end.
        with contextlib.suppress(BrokenPipeError):
            rank.stdin.write(b"\n")


@contextlib.contextmanager
def _start(
    logs: list[Path], arguments: Mapping[str, str]
) -> Iterator[tuple[processes.Job, Testbed]]:
    """Make a network and start a torchrun in each namespace; on leaving, both are gone."""
    with tempfile.TemporaryDirectory(prefix="comm-hooks-") as scratch:
        path = Path(scratch, "events.jsonl")
        worker = processes.worker_command("bench", {**arguments, "events": str(path)})
        with contextlib.closing(EventReader(path)) as events, Testbed(len(logs)) as bed:
            ranks = []
            for rank, log in enumerate(logs):
                with log.open("wb") as output:
                    ranks.append(
                        bed.start(
                            rank,
                            [*processes.TORCHRUN, *worker],
                            environment={**bed.environment(rank), "PET_LOG_DIR": scratch},
                            bufsize=0,
                            stdin=subprocess.PIPE,  # for the worker, see its module
                            stdout=output,
                            stderr=subprocess.STDOUT,
                        )
                    )
            yield processes.Job(ranks, logs, events), bed
