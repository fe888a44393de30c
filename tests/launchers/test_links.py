"""Who measures a link with whom, and what comes out where its speed is known."""

import itertools

import pytest

from comm_hooks.launchers import links
from comm_hooks.launchers.links import make_rounds, measure_bandwidth, measure_delay, nodes_of


@pytest.mark.parametrize("nodes", range(1, 40))
def test_everybody_is_measured_and_nobody_twice_at_once(nodes: int) -> None:
    rounds = make_rounds(nodes, all_pairs_up_to=8)
    for pairs in rounds:
        busy = [node for pair in pairs for node in pair]
        assert len(busy) == len(set(busy))
    measured = [pair for pairs in rounds for pair in pairs]
    assert len(measured) == len(set(measured))
    if nodes <= 8:
        assert set(measured) == set(itertools.combinations(range(nodes), 2))
    else:
        assert set(measured) == {tuple(sorted((i, (i + 1) % nodes))) for i in range(nodes)}
        assert len(rounds) <= 3


def test_ranks_of_a_node_need_not_be_neighbours() -> None:
    assert nodes_of(["a", "b", "a", "b"]) == [[0, 2], [1, 3]]


class Wire:
    """A link of a known speed, whose other end is as many seconds ahead; time passes on it alone.

    Args:
        held_up: by its number the transfer that takes five times as long.
    """

    def __init__(self, latency: float, bandwidth: float, ahead: float, held_up: int = -1) -> None:
        self.now = 0.0
        self.transfers: list[int] = []
        self._latency, self._bandwidth, self._ahead = latency, bandwidth, ahead
        self._held_up = held_up

    def send(self, count: int) -> None:
        self.transfers.append(count)
        factor = 5 if len(self.transfers) - 1 == self._held_up else 1
        self.now += self._latency + factor * count / self._bandwidth

    def hear(self) -> float:
        answer = self.now + self._ahead
        self.now += self._latency
        return answer

    def tell(self, number: float) -> None:
        pass

    def receive(self, count: int) -> None:
        raise AssertionError("the source of a link receives nothing but numbers")


@pytest.mark.parametrize("bandwidth", [1e4, 1e6, 1e9, 1e12])
def test_a_known_speed_is_found(bandwidth: float, monkeypatch: pytest.MonkeyPatch) -> None:
    wire = Wire(0.02, bandwidth, ahead=3.0)
    monkeypatch.setattr(links.time, "perf_counter", lambda: wire.now)
    monkeypatch.setattr(links.time, "time", lambda: wire.now)
    delay = measure_delay(wire)
    assert delay.latency == pytest.approx(0.02 + 0.5 / bandwidth)
    assert delay.round_trip == pytest.approx(0.04 + 1 / bandwidth)
    assert delay.clock_offset == pytest.approx(3.0, abs=1 / bandwidth)
    assert measure_bandwidth(wire, 0.02, repeat=1) == pytest.approx(bandwidth, rel=1e-3)


def test_a_transfer_that_is_held_up_does_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    steady = Wire(0.0, 1e6, ahead=0.0)
    monkeypatch.setattr(links.time, "perf_counter", lambda: steady.now)
    measure_bandwidth(steady, 0.0, repeat=3)
    # They grow to one of 0.4 s, and only that one is repeated.
    sizes = steady.transfers
    assert len(set(sizes)) == len(sizes) - 2
    assert 0.4e6 <= sizes[-1] == sizes[-2] == sizes[-3] < 3.2e6
    wire = Wire(0.0, 1e6, ahead=0.0, held_up=len(sizes) - 2)
    monkeypatch.setattr(links.time, "perf_counter", lambda: wire.now)
    assert measure_bandwidth(wire, 0.0, repeat=3) == pytest.approx(1e6)
