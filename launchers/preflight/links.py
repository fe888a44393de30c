"""The links between nodes: latency, bandwidth in each direction, and how far clocks are apart.

Plain TCP between one process of each node: what gloo and NCCL's sockets run over, without anything
that hangs where a port is closed.
"""

import itertools
import os
import socket
import struct
import time
from collections.abc import Iterator
from dataclasses import dataclass

_CONNECT_SECONDS = 5.0
_ACCEPT_SECONDS = 10.0
_PINGS = 20
# Queues fill first, and what shapers let through after a pause is not their rate.
_FILL_SECONDS = 0.1
_COUNT_SECONDS = 0.4
_CHUNK = bytes(256 * 1024)
_ALL_PAIRS_UP_TO = 8

_NUMBER = struct.Struct("!q")
_TIME = struct.Struct("!d")


@dataclass
class Link:
    """One direction between two nodes.

    Args:
        source, target: indices of nodes.
        round_trip: seconds, the shortest of 20.
        bits_per_second: as it arrives at the target, in one TCP connection.
        clock_offset: seconds by which the target's clock is ahead of the source's.
        error: why there are no figures.
    """

    source: int
    target: int
    round_trip: float | None = None
    bits_per_second: float | None = None
    clock_offset: float | None = None
    error: str | None = None


def make_rounds(nodes: int) -> list[list[tuple[int, int]]]:
    """Return pairs of nodes in rounds; in a round no node is in two pairs.

    Every pair up to eight nodes (a round-robin tournament, as chess clubs have it), else each node
    with its two neighbours on a ring: a node with a bad link still shows.

    Example::

        >>> make_rounds(2), make_rounds(4)
        ([[(0, 1)]], [[(0, 3), (1, 2)], [(0, 2), (1, 3)], [(0, 1), (2, 3)]])
    """
    if nodes < 2:
        return []
    if nodes > _ALL_PAIRS_UP_TO:
        ring = list(itertools.pairwise([*range(nodes), 0]))
        last = [ring.pop()] if nodes % 2 else []
        rounds = [ring[0::2], ring[1::2], last]
        return [[(min(p), max(p)) for p in pairs] for pairs in rounds if pairs]
    # One stays, the others move on by a seat; with an odd number somebody plays nobody.
    players = [*range(nodes), *([-1] if nodes % 2 else [])]
    half, rounds = len(players) // 2, []
    for _ in range(len(players) - 1):
        pairs = zip(players[:half], reversed(players[half:]), strict=True)
        rounds.append(sorted((min(p), max(p)) for p in pairs if -1 not in p))
        players = [players[0], players[-1], *players[1:-1]]
    return rounds


class Listener:
    """Where a node is reached for measurements."""

    def __init__(self, address: str) -> None:
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        self._socket = socket.create_server((address, 0), family=family)
        self.port = int(self._socket.getsockname()[1])

    def receive(self, link: Link) -> Link:
        """Answer the source of a link and measure what arrives; returns the link, filled in."""
        deadline = time.monotonic() + _ACCEPT_SECONDS
        try:
            while True:
                self._socket.settimeout(max(0.01, deadline - time.monotonic()))
                connection, _ = self._socket.accept()
                with connection:
                    connection.settimeout(_CONNECT_SECONDS)
                    if _NUMBER.unpack(_read(connection, _NUMBER.size))[0] != link.source:
                        continue
                    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                    for _ in range(_PINGS):
                        _read(connection, 1)
                        connection.sendall(_TIME.pack(time.time()))
                    link.bits_per_second = _count(connection)
                    # Drop what is still on its way instead of waiting for it.
                    linger = struct.pack("ii", 1, 0)
                    connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
                return link
        except OSError as error:
            link.error = _reason(error, "nobody connected")
            return link

    def close(self) -> None:
        self._socket.close()


def send(link: Link, address: str, port: int) -> Link:
    """Connect to the target of a link, time pings, then send until it has seen enough."""
    try:
        connection = socket.create_connection((address, port), timeout=_CONNECT_SECONDS)
    except OSError as error:
        link.error = _reason(error, "no answer (a firewall, or the wrong interface)")
        return link
    with connection:
        try:
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            connection.sendall(_NUMBER.pack(link.source))
            for round_trip, offset in _pings(connection):
                if link.round_trip is None or round_trip < link.round_trip:
                    link.round_trip, link.clock_offset = round_trip, offset
        except OSError as error:
            link.error = _reason(error, "no answer to pings")
            return link
        try:
            while True:
                connection.sendall(_CHUNK)
        except TimeoutError:
            link.error = "stalls: nothing gets through"
        except OSError:
            pass  # the target closes the connection when it has counted enough
    return link


def _pings(connection: socket.socket) -> Iterator[tuple[float, float]]:
    """Yield (round trip, clock offset of the other side) in seconds."""
    for _ in range(_PINGS):
        wall, start = time.time(), time.perf_counter()
        connection.sendall(b"?")
        theirs = _TIME.unpack(_read(connection, _TIME.size))[0]
        round_trip = time.perf_counter() - start
        yield round_trip, theirs - (wall + round_trip / 2)


def _count(connection: socket.socket) -> float:
    """Return the bits per second that arrive once queues are full."""
    buffer = memoryview(bytearray(len(_CHUNK)))
    first = start = time.perf_counter()
    received = 0
    while True:
        size = connection.recv_into(buffer)
        now = time.perf_counter()
        if not size:
            raise ConnectionError("the connection was closed early")
        if now - first < _FILL_SECONDS:
            start, received = now, 0
            continue
        received += size
        if now - start >= _COUNT_SECONDS:
            return 8 * received / (now - start)


def _read(connection: socket.socket, size: int) -> bytes:
    content = b""
    while len(content) < size:
        part = connection.recv(size - len(content))
        if not part:
            raise ConnectionError("the connection was closed early")
        content += part
    return content


def _reason(error: OSError, timed_out: str) -> str:
    if isinstance(error, TimeoutError):
        return timed_out
    return os.strerror(error.errno).lower() if error.errno else str(error)
