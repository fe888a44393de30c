"""What measurements were made on."""

import platform
from pathlib import Path


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
