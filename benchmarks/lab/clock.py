"""When a time may be taken, where, and what of it may be another load's."""

import platform
import statistics
import time
from collections.abc import Sequence
from pathlib import Path

MOST_STARVED = 0.1
"""Of the time that a thread waited for a processor: more, and its times are another load's, too."""
MOST_RANGE = 0.25
"""Of a time, by which the middle half of its takes differ: the same."""

_SCHEDSTAT = Path("/proc/thread-self/schedstat")


def starved_seconds() -> float | None:
    """Return how long the calling thread has been kept waiting for a processor, all in all.

    That is the time in which it could have run, but other threads did, its own process's or
    another's; on Linux, in a container too, also where a quota of processor time was used up.
    None where the system does not tell.
    """
    try:
        return int(_SCHEDSTAT.read_text().split()[1]) / 1e9
    except (OSError, ValueError, IndexError):
        return None


def processor() -> str:
    """Return the processor's name, where Linux tells, else its architecture.

    Speed and even rounding differ between processors of one architecture.
    """
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()


def quartile_range(takes: Sequence[float]) -> float:
    """Return by how much the middle half of some takes of the same thing differ.

    One that a busy moment spoilt does not count, a load that comes and goes does.

    Example::

        >>> quartile_range([1.0, 1.0, 1.0, 1.0, 9.0])
        0.0
        >>> quartile_range([1.0, 3.0, 1.0, 3.0, 2.0])
        2.0
    """
    if len(takes) < 2:
        return 0.0
    first, _, third = statistics.quantiles(takes, method="inclusive")
    return third - first


def roughly(value: float) -> str:
    """Return a figure of which noise leaves one digit.

    Example::

        >>> roughly(1861.4), roughly(0.0284)
        ('~2,000', '~0.03')
    """
    return f"~{float(f'{value:.0e}'):,g}"


class Starvation:
    """For which share of the time since it was made the calling thread waited for a processor.

    Example::

        >>> from benchmarks.lab.clock import Starvation
        >>> starvation = Starvation()
        >>> 0 <= starvation.share() <= 1
        True
    """

    def __init__(self) -> None:
        self._since = time.perf_counter()
        self._before = starved_seconds()

    def share(self) -> float:
        """Return the share, 0 where the system does not tell."""
        now = starved_seconds()
        if now is None or self._before is None:
            return 0.0
        return min(1.0, (now - self._before) / max(1e-9, time.perf_counter() - self._since))
