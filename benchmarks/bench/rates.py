"""The rates of links, as users write them."""

from comm_hooks.launchers.rates import parse_rate

UNSHAPED = "none"
"""Links without a cap: as fast as the machine moves bytes."""

_LEAST = "100kbit"


def parse_rates(text: str) -> list[str]:
    """Return the rates of a comma-separated list: unshaped first, then from fast to slow.

    Args:
        text: rates as ``tc`` writes them, and ``none``, which is measured in any case.

    Raises:
        ValueError: for a rate that cannot be or that is named twice; the message is one line.

    Example::

        >>> parse_rates("10mbit,1gbit")
        ['none', '1gbit', '10mbit']
    """
    capped: dict[float, str] = {}
    for rate in (part.strip() for part in text.split(",")):
        if rate == UNSHAPED:
            continue
        bits = parse_rate(rate)
        if bits < parse_rate(_LEAST):
            raise ValueError(
                f"rate {rate!r} is below {_LEAST}, where one step of all-reduce takes half an hour"
            )
        if bits in capped:
            raise ValueError(f"rate {rate!r} is named twice (as {capped[bits]!r})")
        capped[bits] = rate
    return [UNSHAPED, *(capped[bits] for bits in sorted(capped, reverse=True))]


def bits_per_second(rate: str) -> float | None:
    """Return the bits per second of a rate from :func:`parse_rates`, None if unshaped."""
    return None if rate == UNSHAPED else parse_rate(rate)


def show_rate(rate: str) -> str:
    """Return a rate as people read it: ``10 Mbit/s``, ``unshaped``."""
    bits = bits_per_second(rate)
    return "unshaped" if bits is None else show_bits(bits)


def show_bits(bits_per_second: float) -> str:
    """Return a number of bits per second with three digits: ``4.9 Gbit/s``."""
    for unit in ("", "k", "M"):
        if bits_per_second < 999.5:
            return f"{bits_per_second:.3g} {unit}bit/s"
        bits_per_second /= 1000
    return f"{bits_per_second:.3g} Gbit/s"
