"""Measurement of a link between two processes over any channel; reading and writing of rates."""

import itertools
import re
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

_RATE = re.compile(r"(\d+(?:\.\d+)?)(k|m|g)?bit")
_PREFIXES = {None: 1.0, "k": 1e3, "m": 1e6, "g": 1e9}
_PINGS = 30
_FIRST_BYTES = 1 << 14
_MOST_BYTES = 1 << 28
# A transfer of this length is past TCP's slow start on links down to a few Mbit, and past what
# shapers let through after a pause.
_ENOUGH_SECONDS = 0.4


class Channel(Protocol):
    """One end of a link: sends bytes and numbers to the other end, and receives them."""

    def send(self, count: int) -> None:
        """Send ``count`` bytes of any content."""

    def receive(self, count: int) -> None:
        """Wait until ``count`` bytes have arrived."""

    def tell(self, number: float) -> None:
        """Send a number to the other end."""

    def hear(self) -> float:
        """Wait for a number from the other end, and return it."""


@dataclass(frozen=True)
class Delay:
    """The delay of small messages, and the difference between the clocks of both ends.

    Attributes:
        latency: half of the median round trip of 30, in seconds.
        round_trip: the shortest round trip of 30, in seconds.
        clock_offset: seconds by which the other end's clock is ahead.
    """

    latency: float
    round_trip: float
    clock_offset: float


def measure_delay(channel: Channel) -> Delay:
    """Measure the delay by 30 small messages to the other end, which must run :func:`answer`."""
    pings = []
    for _ in range(_PINGS):
        wall, started = time.time(), time.perf_counter()
        channel.send(1)
        theirs = channel.hear()
        seconds = time.perf_counter() - started
        pings.append((seconds, theirs - (wall + seconds / 2)))
    median = statistics.median(seconds for seconds, _ in pings)
    return Delay(median / 2, *min(pings))


def measure_bandwidth(channel: Channel, latency: float, *, repeat: int) -> float:
    """Return the bytes per second to the other end, after :func:`measure_delay`.

    Transfers grow until one takes 0.4 s or has 256 MiB.  Other traffic on the link counts, too.

    Args:
        channel: the channel to the other end, which runs :func:`answer` until this returns.
        latency: the one-way latency in seconds.
        repeat: the number of transfers of the last size; the median counts, in case a machine is
            busy for a moment.
    """

    def transfer() -> float:
        channel.tell(count)
        started = time.perf_counter()
        channel.send(count)
        channel.hear()  # it has arrived
        return max(1e-9, time.perf_counter() - started - 2 * latency)

    count = _FIRST_BYTES
    while (seconds := transfer()) < _ENOUGH_SECONDS and count < _MOST_BYTES:
        growth = min(8.0, max(2.0, 1.2 * _ENOUGH_SECONDS / seconds))
        count = min(_MOST_BYTES, int(growth * count))
    takes = [seconds, *(transfer() for _ in range(repeat - 1))]
    channel.tell(0)
    return count / statistics.median(takes)


def answer(channel: Channel) -> None:
    """Serve as the other end of :func:`measure_delay` and then :func:`measure_bandwidth`."""
    for _ in range(_PINGS):
        channel.receive(1)
        channel.tell(time.time())
    while count := int(channel.hear()):
        channel.receive(count)
        channel.tell(0.0)


def nodes_of(labels: Sequence[str]) -> list[list[int]]:
    """Return a list of ranks for each node, from the label of the node of each rank.

    Example::

        >>> nodes_of(["a", "a", "b", "b"])
        [[0, 1], [2, 3]]
    """
    nodes: dict[str, list[int]] = {}
    for rank, label in enumerate(labels):
        nodes.setdefault(label, []).append(rank)
    return list(nodes.values())


def make_rounds(nodes: int, all_pairs_up_to: int) -> list[list[tuple[int, int]]]:
    """Return rounds of pairs of nodes; in a round no node is in two pairs.

    Up to ``all_pairs_up_to`` nodes all pairs (a round-robin tournament), else each node with its
    two neighbours on a ring, which still finds a node with a bad link.

    Example::

        >>> make_rounds(4, all_pairs_up_to=8)
        [[(0, 3), (1, 2)], [(0, 2), (1, 3)], [(0, 1), (2, 3)]]
        >>> make_rounds(5, all_pairs_up_to=3)
        [[(0, 1), (2, 3)], [(1, 2), (3, 4)], [(0, 4)]]
    """
    if nodes < 2:
        return []
    if nodes > all_pairs_up_to:
        ring = list(itertools.pairwise([*range(nodes), 0]))
        last = [ring.pop()] if nodes % 2 else []
        rounds = [ring[0::2], ring[1::2], last]
        return [[(min(p), max(p)) for p in pairs] for pairs in rounds if pairs]
    # One stays, the others move on by a seat; with an odd number one pauses.
    players = [*range(nodes), *([-1] if nodes % 2 else [])]
    half, rounds = len(players) // 2, []
    for _ in range(len(players) - 1):
        pairs = zip(players[:half], reversed(players[half:]), strict=True)
        rounds.append(sorted((min(p), max(p)) for p in pairs if -1 not in p))
        players = [players[0], players[-1], *players[1:-1]]
    return rounds


def parse_rate(rate: str) -> float:
    """Return the bits per second of a rate as ``tc`` writes it.

    Raises:
        ValueError: for other text than a positive number of bit, kbit, mbit or gbit.  (The mbps
            of ``tc`` are megabytes per second, so they are refused, too.)

    Example::

        >>> parse_rate("100mbit")
        100000000.0
    """
    found = _RATE.fullmatch(rate)
    if not found or float(found[1]) == 0:
        raise ValueError(f"rate {rate!r}: write a number and a unit, such as 10mbit or 1gbit")
    return float(found[1]) * _PREFIXES[found[2]]


def format_rate(bits_per_second: float) -> str:
    """Return a rate as text, in Gbit/s, Mbit/s or kbit/s.

    Example::

        >>> format_rate(94.3e6), format_rate(9.41e9), format_rate(56e3)
        ('94 Mbit/s', '9.4 Gbit/s', '56 kbit/s')
    """
    if bits_per_second >= 999.5e6:
        return f"{bits_per_second / 1e9:.1f} Gbit/s"
    if bits_per_second < 1e5:
        return f"{bits_per_second / 1e3:.0f} kbit/s"
    megabits = bits_per_second / 1e6
    return f"{megabits:.0f} Mbit/s" if megabits >= 10 else f"{megabits:.1f} Mbit/s"
