"""A network of capped links: it caps, it counts, and nothing of it is left."""

import os
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.netns import NetnsError, Testbed, testbed, why_not
from benchmarks.netns.links import burst_bytes
from comm_hooks.launchers.rates import parse_rate

needs_bed = pytest.mark.skipif(bool(why_not()), reason=why_not() or "")

# Sends argv[2] bytes from rank 0 to rank 1 and prints the seconds until all have arrived.
TRANSFER = """
import os, socket, sys, time
count = int(sys.argv[1])
if os.environ["RANK"] == "1":
    with socket.create_server(("", 5000)) as server:
        peer, _ = server.accept()
        print("connected", flush=True)
        left = count
        while left:
            left -= len(peer.recv(1 << 16))
        peer.sendall(b"!")
else:
    while True:
        try:
            peer = socket.create_connection(("rank1", 5000))
            break
        except OSError:
            time.sleep(0.01)
    started = time.perf_counter()
    peer.sendall(bytes(count))
    peer.recv(1)
    print(time.perf_counter() - started)
"""


def start_transfer(network: Testbed, count: int) -> list["subprocess.Popen[str]"]:
    command = [sys.executable, "-c", TRANSFER, str(count)]
    return [
        network.start(rank, command, stdout=subprocess.PIPE, text=True)
        for rank in range(network.ranks)
    ]


def seconds_of(network: Testbed, transfer: list["subprocess.Popen[str]"]) -> float:
    assert network.wait(transfer, timeout=60) == [0, 0]
    assert transfer[0].stdout
    return float(transfer[0].stdout.read())


def exists(namespace: str) -> bool:
    return Path("/run/netns", namespace).exists() or Path("/etc/netns", namespace).exists()


def runs(process: int) -> bool:
    """Return whether a process runs: one that has ended may wait for its new parent to notice."""
    try:
        status = Path("/proc", str(process), "status").read_text()
    except OSError:
        return False
    return "State:\tZ" not in status


def wait_until_gone(names: list[str], process: int) -> None:
    deadline = time.monotonic() + 30
    while any(map(exists, names)) or runs(process):
        assert time.monotonic() < deadline, "still there"
        time.sleep(0.05)


@given(st.integers(1, 10**6), st.sampled_from(["", "k", "m", "g"]))
def test_rates_are_read_as_tc_reads_them(number: int, prefix: str) -> None:
    assert parse_rate(f"{number}{prefix}bit") == number * 1000 ** ["", "k", "m", "g"].index(prefix)


@pytest.mark.parametrize("rate", ["100mbps", "100", "fast", "-1mbit", "0mbit", "1 mbit", "none"])
def test_other_rates_are_refused(rate: str) -> None:
    with pytest.raises(ValueError, match="10mbit or 1gbit"):
        parse_rate(rate)
    with pytest.raises(ValueError, match="10mbit or 1gbit"):
        Testbed(2, rate=rate)


@given(st.integers(1, 10**5))
def test_hardly_anything_passes_for_free(megabits: int) -> None:
    """The bucket is one millisecond's worth, but two frames at least: one could not leave."""
    free = burst_bytes(f"{megabits}mbit")
    assert free == max(2 * 1514, megabits * 125)


@pytest.mark.parametrize("ranks", [0, -1, 201])
def test_numbers_of_ranks_that_cannot_be(ranks: int) -> None:
    with pytest.raises(ValueError, match="between 1 and 200"):
        Testbed(ranks)


@needs_bed
def test_the_cap_holds_and_the_counters_count() -> None:
    count, overhead = 200_000, 1514 / 1448
    with Testbed(2, rate="10mbit") as network:
        before = network.counters()
        seconds = seconds_of(network, start_transfer(network, count))
        after = network.counters()
        free = burst_bytes("10mbit")
        assert seconds > (count * overhead - 2 * free) * 8 / 10e6
        sent = after[0].sent - before[0].sent
        received = after[1].received - before[1].received
        assert count < sent < 1.15 * count
        assert received == pytest.approx(sent, rel=0.02)


@needs_bed
def test_rates_change_while_data_flows() -> None:
    """At the first rate it would take over two minutes."""
    count = 16_000_000
    with Testbed(2, rate="1mbit") as network:
        transfer = start_transfer(network, count)
        assert transfer[1].stdout
        assert transfer[1].stdout.readline() == "connected\n"
        network.set_rate(None)
        seconds_of(network, transfer)


@needs_bed
def test_one_direction_of_one_link() -> None:
    def caps(network: Testbed) -> dict[str, bool]:
        ends = {f"up {r}": (n, "eth0") for r, n in enumerate(network.namespaces)}
        ends |= {f"down {r}": (network.switch, f"port{r}") for r in range(network.ranks)}
        found = {}
        for end, (namespace, device) in ends.items():
            command = ["tc", "-n", namespace, "qdisc", "show", "dev", device]
            shown = subprocess.run(command, capture_output=True, text=True, check=True).stdout
            found[end] = "rate 3Mbit" in shown
        return found

    with Testbed(3) as network:
        assert not any(caps(network).values())
        network.set_rate("3mbit", ranks=[1], direction="down")
        network.set_rate("3mbit", ranks=[2], direction="up")
        assert {end for end, capped in caps(network).items() if capped} == {"down 1", "up 2"}
        network.set_rate("3mbit")
        assert all(caps(network).values())
        network.set_rate(None, ranks=[0])
        assert {end for end, capped in caps(network).items() if not capped} == {"up 0", "down 0"}
        with pytest.raises(ValueError, match="10mbit or 1gbit"):
            network.set_rate("3mbps")


@needs_bed
def test_beds_do_not_meet() -> None:
    with Testbed(2) as one, Testbed(2) as other:
        assert not {one.switch, *one.namespaces} & {other.switch, *other.namespaces}
        # The same addresses and the same port, in different networks.
        transfers = start_transfer(one, 10), start_transfer(other, 10)
        seconds_of(one, transfers[0])
        seconds_of(other, transfers[1])


@needs_bed
def test_nothing_is_left_after_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(testbed, "_GRACE_SECONDS", 0.5)
    network = Testbed(2)
    names = [network.switch, *network.namespaces]
    started: list[subprocess.Popen[str]] = []
    children: list[int] = []

    def fail() -> None:
        # Does not listen, and has a child in a session of its own, as torchrun has.
        script = "trap '' TERM; setsid sleep 1000 & echo $!; wait; sleep 1000"
        with network:
            command = ["sh", "-c", script]
            started.append(network.start(0, command, stdout=subprocess.PIPE, text=True))
            assert started[0].stdout
            children.append(int(started[0].stdout.readline()))
            assert all(map(exists, names))
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail()
    assert started[0].returncode is not None
    assert not any(map(exists, names))
    wait_until_gone(names, children[0])


@needs_bed
def test_what_still_runs_is_asked_to_end_before_it_is_killed(tmp_path: Path) -> None:
    script = f"trap 'echo asked > {tmp_path}/asked; exit' TERM; echo ready; sleep 1000 & wait"
    with Testbed(1) as network:
        process = network.start(0, ["sh", "-c", script], stdout=subprocess.PIPE, text=True)
        assert process.stdout
        assert process.stdout.readline() == "ready\n"
    assert (tmp_path / "asked").read_text() == "asked\n"


@needs_bed
def test_nothing_is_left_of_a_maker_that_is_killed() -> None:
    script = """
        import time
        from benchmarks.netns import Testbed
        with Testbed(2) as network:
            process = network.start(1, ["sleep", "1000"])
            print(process.pid, network.switch, *network.namespaces, flush=True)
            time.sleep(1000)
    """
    maker = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(script)],
        stdout=subprocess.PIPE,
        text=True,
        cwd=Path(__file__).parents[2],
    )
    assert maker.stdout
    process, *names = maker.stdout.readline().split()
    assert all(map(exists, names))
    maker.send_signal(signal.SIGKILL)
    maker.wait()
    wait_until_gone(names, int(process))


@needs_bed
def test_ranks_do_not_outlive_one_that_failed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(testbed, "_AFTER_FAILURE_SECONDS", 0.2)
    with Testbed(2) as network:
        codes = network.wait(
            [network.start(0, ["sleep", "1000"]), network.start(1, ["sh", "-c", "exit 3"])]
        )
    assert codes == [-signal.SIGTERM, 3]


@needs_bed
def test_ranks_are_ended_when_time_is_up() -> None:
    with Testbed(1) as network:
        assert network.wait([network.start(0, ["sleep", "1000"])], timeout=0.2) == [-signal.SIGTERM]


def test_one_line_says_why_not(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    why_not.cache_clear()
    try:
        assert "needs root" in (why_not() or "")
        monkeypatch.setattr(os, "geteuid", lambda: 0)
        monkeypatch.setenv("PATH", "/nowhere")
        why_not.cache_clear()
        assert "install iproute2" in (why_not() or "")
        with pytest.raises(NetnsError, match="iproute2"), Testbed(2):
            pass
    finally:
        monkeypatch.undo()
        why_not.cache_clear()
