"""What comes out of a measurement on a real connection."""

import socket
import struct
import threading
import time

import pytest

from comm_hooks.launchers.preflight import links
from comm_hooks.launchers.preflight.links import Link, Listener, send


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
    assert sent.clock_offset == pytest.approx(0, abs=0.5)
    assert sent.bits_per_second is not None
    assert sent.bits_per_second > 1e6


def test_a_clock_that_is_ahead_shows(monkeypatch: pytest.MonkeyPatch) -> None:
    # The target asks for the time in a thread, the source in this one.
    here, now = threading.get_ident(), time.time
    monkeypatch.setattr(
        time, "time", lambda: now() + (100.0 if threading.get_ident() != here else 0.0)
    )
    sent, _ = measure()
    assert sent.clock_offset == pytest.approx(100, abs=0.5)


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
    assert listener.receive(Link(0, 1)).error == "nobody connected"
    # Accepted by the kernel, answered by nobody.
    assert send(Link(0, 1), "127.0.0.1", listener.port).error == "no answer to pings"
    listener.close()
