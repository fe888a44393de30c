"""Measurement of the links between nodes over plain TCP, as gloo and NCCL's sockets use it.

One process of each node takes part.  A closed port is an error, not a hang.
"""

import itertools
import os
import socket
import statistics
import struct
import time
from dataclasses import dataclass

_CONNECT_SECONDS = 5.0
_ACCEPT_SECONDS = 10.0
_NUMBER = struct.Struct("!d")
_PINGS = 30
_FIRST_BYTES = 1 << 14
_MOST_BYTES = 1 << 26
# A transfer of this length is past TCP's slow start on links down to a few Mbit, and past what
# shapers let through after a pause.
_ENOUGH_SECONDS = 0.4
_REPEAT = 3
"""Transfers of the last size; the median counts, in case a machine is busy for a moment."""


@dataclass
class Link:
    """The measured link from node ``source`` to node ``target``.

    Args:
        source, target: indices of nodes.
        round_trip: the median of 30 round trips, in seconds.
        bits_per_second: the rate in one TCP connection.
        error: the reason if the measurement failed.
    """

    source: int
    target: int
    round_trip: float | None = None
    bits_per_second: float | None = None
    error: str | None = None


class Connection:
    """One end of a link over TCP."""

    def __init__(self, connection: socket.socket) -> None:
        connection.settimeout(_CONNECT_SECONDS)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._socket = connection
        self._buffer = memoryview(bytearray(256 * 1024))

    def send(self, count: int) -> None:
        """Send ``count`` bytes of any content."""
        while count:
            size = min(count, len(self._buffer))
            self._socket.sendall(self._buffer[:size])
            count -= size

    def receive(self, count: int) -> None:
        """Receive ``count`` bytes into the buffer, which the next bytes overwrite."""
        while count:
            size = self._socket.recv_into(self._buffer[: min(count, len(self._buffer))])
            if not size:
                raise ConnectionError("the connection was closed early")
            count -= size

    def send_number(self, number: float) -> None:
        """Send a number in eight bytes."""
        self._socket.sendall(_NUMBER.pack(number))

    def receive_number(self) -> float:
        """Receive a number that :meth:`send_number` sent."""
        self.receive(_NUMBER.size)
        return float(_NUMBER.unpack(self._buffer[: _NUMBER.size])[0])


class Listener:
    """A TCP port of this node, at which it answers measurements of links."""

    def __init__(self, address: str) -> None:
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        self._socket = socket.create_server((address, 0), family=family)
        self.port = int(self._socket.getsockname()[1])

    def receive(self, link: Link) -> Link:
        """Answer the measurement by the link's source; return the link, with the error if any."""
        deadline = time.monotonic() + _ACCEPT_SECONDS
        try:
            while True:
                self._socket.settimeout(max(0.01, deadline - time.monotonic()))
                connection, _ = self._socket.accept()
                with connection:
                    channel = Connection(connection)
                    if channel.receive_number() == link.source:
                        while count := int(channel.receive_number()):
                            channel.receive(count)
                            channel.send_number(0.0)
                        return link
        except OSError as error:
            link.error = _reason(error, "no connection arrived")
            return link

    def close(self) -> None:
        self._socket.close()


def send(link: Link, address: str, port: int) -> Link:
    """Connect to the link's target, measure, and return the link with the measurements or error."""
    timed_out = "no answer (a firewall, or the wrong interface)"
    try:
        with socket.create_connection((address, port), timeout=_CONNECT_SECONDS) as connection:
            channel = Connection(connection)
            timed_out = "no answer to pings"
            channel.send_number(link.source)
            link.round_trip = statistics.median(_transfer(channel, 1) for _ in range(_PINGS))
            timed_out = "stalls: nothing gets through"
            link.bits_per_second = 8 * _measure_bandwidth(channel, link.round_trip)
            channel.send_number(0.0)
    except OSError as error:
        link.error = _reason(error, timed_out)
    return link


def _transfer(channel: Connection, count: int) -> float:
    """Send ``count`` bytes, and return the seconds until their receipt is acknowledged."""
    started = time.perf_counter()
    channel.send_number(count)
    channel.send(count)
    channel.receive_number()
    return time.perf_counter() - started


def _measure_bandwidth(channel: Connection, round_trip: float) -> float:
    """Return the bytes per second, from transfers that grow until one takes 0.4 s or has 64 MiB.

    Other traffic on the link counts, too.
    """

    def transfer() -> float:
        return max(1e-9, _transfer(channel, count) - round_trip)

    count = _FIRST_BYTES
    while (seconds := transfer()) < _ENOUGH_SECONDS and count < _MOST_BYTES:
        growth = min(8.0, max(2.0, 1.2 * _ENOUGH_SECONDS / seconds))
        count = min(_MOST_BYTES, int(growth * count))
    return count / statistics.median([seconds, *(transfer() for _ in range(_REPEAT - 1))])


def make_rounds(nodes: int) -> list[list[tuple[int, int]]]:
    """Return the pairs of neighbours on a ring, in rounds; in a round no node is in two pairs."""
    if nodes < 3:
        return [[(0, 1)]] if nodes == 2 else []
    ring = [*itertools.pairwise(range(nodes)), (0, nodes - 1)]
    last = [ring.pop()] if nodes % 2 else []
    return [pairs for pairs in (ring[0::2], ring[1::2], last) if pairs]


def _reason(error: OSError, timed_out: str) -> str:
    if isinstance(error, TimeoutError):
        return timed_out
    return os.strerror(error.errno).lower() if error.errno else str(error)
