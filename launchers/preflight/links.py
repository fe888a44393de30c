"""Measurement of the links between nodes over plain TCP, as gloo and NCCL's sockets use it.

One process of each node takes part.  A closed port is an error, not a hang.
"""

import os
import socket
import struct
import time
from dataclasses import dataclass

from comm_hooks.launchers.links import answer, measure_bandwidth, measure_delay

_CONNECT_SECONDS = 5.0
_ACCEPT_SECONDS = 10.0
_NUMBER = struct.Struct("!d")


@dataclass
class Link:
    """The measured link from node ``source`` to node ``target``.

    Args:
        source, target: the indices of the nodes.
        round_trip: the shortest round trip of 30, in seconds.
        bits_per_second: the bandwidth of one TCP connection.
        clock_offset: seconds by which the target's clock is ahead of the source's.
        error: the reason if the measurement failed.
    """

    source: int
    target: int
    round_trip: float | None = None
    bits_per_second: float | None = None
    clock_offset: float | None = None
    error: str | None = None


class _Connection:
    """A :class:`~comm_hooks.launchers.links.Channel` over a TCP connection."""

    def __init__(self, connection: socket.socket) -> None:
        connection.settimeout(_CONNECT_SECONDS)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._socket = connection
        self._buffer = memoryview(bytearray(256 * 1024))

    def send(self, count: int) -> None:
        while count:
            size = min(count, len(self._buffer))
            self._socket.sendall(self._buffer[:size])
            count -= size

    def receive(self, count: int) -> None:
        while count:
            size = self._socket.recv_into(self._buffer[: min(count, len(self._buffer))])
            if not size:
                raise ConnectionError("the connection was closed early")
            count -= size

    def tell(self, number: float) -> None:
        self._socket.sendall(_NUMBER.pack(number))

    def hear(self) -> float:
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
                    channel = _Connection(connection)
                    if channel.hear() == link.source:
                        answer(channel)
                        return link
        except OSError as error:
            link.error = _reason(error, "nobody connected")
            return link

    def close(self) -> None:
        self._socket.close()


def send(link: Link, address: str, port: int) -> Link:
    """Connect to the link's target, measure, and return the link with the measurements or error."""
    timed_out = "no answer (a firewall, or the wrong interface)"
    try:
        with socket.create_connection((address, port), timeout=_CONNECT_SECONDS) as connection:
            channel = _Connection(connection)
            timed_out = "no answer to pings"
            channel.tell(link.source)
            delay = measure_delay(channel)
            link.round_trip, link.clock_offset = delay.round_trip, delay.clock_offset
            timed_out = "stalls: nothing gets through"
            # A slow link is measured again.
            link.bits_per_second = 8 * measure_bandwidth(channel, delay.latency, repeat=1)
    except OSError as error:
        link.error = _reason(error, timed_out)
    return link


def _reason(error: OSError, timed_out: str) -> str:
    if isinstance(error, TimeoutError):
        return timed_out
    return os.strerror(error.errno).lower() if error.errno else str(error)
