"""What comes out of a measurement on a real connection."""

import socket
import struct
import threading

import pytest

from comm_hooks.launchers.preflight import links
from comm_hooks.launchers.preflight.links import Link, Listener, make_rounds, send


def measure() -> tuple[Link, Link]:
    """Return what the source and what the target of a link found, on this machine."""
    listener = Listener("127.0.0.1")
    received = Link(3, 5)
    thread = threading.Thread(target=listener.receive, args=(received,))
    thread.start()
    sent = send(Link(3, 5), "127.0.0.1", listener.port)
    thread.join()
    listener.close()
    return sent, received


def test_the_source_finds_the_figures() -> None:
    sent, received = measure()
    assert sent.error is None
    assert received == Link(3, 5)
    assert sent.round_trip is not None
    assert 0 < sent.round_trip < 1
    assert sent.bits_per_second is not None
    assert sent.bits_per_second > 1e6


class Wire:
    """A link of a known speed; time passes on it alone.

    Args:
        held_up: the number of the transfer that takes five times as long.
    """

    def __init__(self, latency: float, bandwidth: float, held_up: int = -1) -> None:
        self.now = 0.0
        self.transfers: list[int] = []
        self._latency, self._bandwidth, self._held_up = latency, bandwidth, held_up

    def send_number(self, number: float) -> None:
        pass

    def send(self, count: int) -> None:
        factor = 5 if len(self.transfers) == self._held_up else 1
        self.transfers.append(count)
        self.now += 2 * self._latency + factor * count / self._bandwidth

    def receive_number(self) -> float:
        return 0.0


def bandwidth_of(wire: Wire, round_trip: float, monkeypatch: pytest.MonkeyPatch) -> float:
    monkeypatch.setattr(links.time, "perf_counter", lambda: wire.now)
    return links._measure_bandwidth(wire, round_trip)  # type: ignore[arg-type]


@pytest.mark.parametrize("bandwidth", [1e4, 1e6, 1e9, 1e12])
def test_a_known_speed_is_found(bandwidth: float, monkeypatch: pytest.MonkeyPatch) -> None:
    wire = Wire(0.02, bandwidth)
    assert bandwidth_of(wire, 0.04, monkeypatch) == pytest.approx(bandwidth, rel=1e-3)


def test_a_transfer_that_is_held_up_does_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    steady = Wire(0.0, 1e6)
    bandwidth_of(steady, 0.0, monkeypatch)
    # They grow to one of 0.4 s, and only that one is repeated.
    sizes = steady.transfers
    assert len(set(sizes)) == len(sizes) - 2
    assert 0.4e6 <= sizes[-1] == sizes[-2] == sizes[-3] < 3.2e6
    wire = Wire(0.0, 1e6, held_up=len(sizes) - 2)
    assert bandwidth_of(wire, 0.0, monkeypatch) == pytest.approx(1e6)


@pytest.mark.parametrize("nodes", range(1, 12))
def test_every_node_is_measured_with_its_neighbours(nodes: int) -> None:
    rounds = make_rounds(nodes)
    for pairs in rounds:
        busy = [node for pair in pairs for node in pair]
        assert len(busy) == len(set(busy))
    measured = [pair for pairs in rounds for pair in pairs]
    assert len(measured) == len(set(measured))
    assert set(measured) == {
        (min(pair), max(pair)) for i in range(nodes) if (pair := {i, (i + 1) % nodes}) != {i}
    }
    assert len(rounds) <= 3


def test_somebody_else_who_connects_is_not_taken_for_the_source() -> None:
    listener = Listener("127.0.0.1")
    received = Link(3, 5)
    with socket.create_connection(("127.0.0.1", listener.port)) as stranger:
        stranger.sendall(struct.pack("!d", 4))
        thread = threading.Thread(target=listener.receive, args=(received,))
        thread.start()
        sent = send(Link(3, 5), "127.0.0.1", listener.port)
        thread.join()
    listener.close()
    assert sent.error is received.error is None


def test_a_closed_port_is_said_at_once() -> None:
    listener = Listener("127.0.0.1")
    listener.close()
    assert send(Link(0, 1), "127.0.0.1", listener.port).error == "connection refused"


def test_nobody_waits_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(links, "_ACCEPT_SECONDS", 0.2)
    monkeypatch.setattr(links, "_CONNECT_SECONDS", 0.2)
    listener = Listener("127.0.0.1")
    assert listener.receive(Link(0, 1)).error == "no connection arrived"
    # Accepted by the kernel, answered by nobody.
    assert send(Link(0, 1), "127.0.0.1", listener.port).error == "no answer to pings"
    listener.close()
