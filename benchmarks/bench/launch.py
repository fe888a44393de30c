"""Run one method in a network of its own, and set its rates when the ranks are ready for them."""

import contextlib
from pathlib import Path

from benchmarks.bench.rates import UNSHAPED
from benchmarks.bench.results import Result, Timing
from benchmarks.lab import processes
from benchmarks.lab.events import Event
from benchmarks.lab.methods import Pair
from benchmarks.lab.plain import rebuild
from benchmarks.lab.runs import Settings
from benchmarks.netns import NetnsError, Testbed


def run_method(
    pair: Pair,
    settings: Settings,
    rates: list[str],
    timing_steps: int,
    corpus: Path,
    log: Path,
    watch: processes.Watch,
    *,
    timeout: float,
) -> Result:
    """Train with a method, each rank in a network namespace, then time it at each rate.

    Args:
        pair: the method.
        settings: shared with the other methods.
        rates: of the links, ``none`` for no cap.
        timing_steps: steps at each rate.
        corpus: the file with the text.
        log: takes the output of the processes.
        watch: called with each event as it happens.
        timeout: seconds without any event after which the method counts as hung.

    Returns:
        The measurements; the run has a ``failure`` if a rank failed or hung, also after the
        training.
    """
    result = Result(processes.new_run(pair, settings))
    try:
        with (
            Testbed(settings.nproc) as bed,
            processes.started(
                "benchmarks.bench.worker",
                pair,
                settings,
                corpus,
                log,
                bed.start,
                rates=",".join(rates),
                timing_steps=timing_steps,
            ) as job,
        ):

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
        # The failure of a rank shows in its report, or in its end.
        with contextlib.suppress(BrokenPipeError):
            rank.stdin.write(b"\n")
