"""Read and print the rates of links."""

import re

_RATE = re.compile(r"(\d+(?:\.\d+)?)(k|m|g)?bit")
_PREFIXES = {None: 1.0, "k": 1e3, "m": 1e6, "g": 1e9}


def parse_rate(rate: str) -> float:
    """Return the bits per second of a rate as ``tc`` writes it.

    Raises:
        ValueError: for other text than a positive number of bit, kbit, mbit or gbit.  (The mbps
            of ``tc`` are megabytes per second, so they are refused, too.)
    """
    found = _RATE.fullmatch(rate)
    if not found or float(found[1]) == 0:
        raise ValueError(f"rate {rate!r}: write a number and a unit, such as 10mbit or 1gbit")
    return float(found[1]) * _PREFIXES[found[2]]


def format_rate(bits_per_second: float) -> str:
    """Return a rate in the usual unit of networks."""
    if bits_per_second >= 999.5e6:
        return f"{bits_per_second / 1e9:.1f} Gbit/s"
    if bits_per_second < 1e5:
        return f"{bits_per_second / 1e3:.0f} kbit/s"
    megabits = bits_per_second / 1e6
    return f"{megabits:.0f} Mbit/s" if megabits >= 10 else f"{megabits:.1f} Mbit/s"
