"""Who plays in a round: drawn alike everywhere, evenly over rounds, and dealt to fixed ranks."""

from collections import Counter
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from comm_hooks.collectives import Simulated
from comm_hooks.optim.rounds import Participation
from comm_hooks.optim.rounds.clock import cut

INF = float("inf")


@given(
    clients=st.integers(1, 60),
    fraction=st.floats(0.01, 1),
    seed=st.integers(0, 5),
    round_index=st.integers(0, 1000),
    world=st.integers(1, 7),
)
def test_everybody_drawn_plays_once_and_at_home(
    clients: int, fraction: float, seed: int, round_index: int, world: int
) -> None:
    participation = Participation(clients, fraction, seed)
    drawn = participation.draw(round_index)
    assert fraction * clients <= len(drawn) < fraction * clients + 1
    assert len(set(drawn)) == len(drawn)
    assert set(drawn) <= set(range(clients))
    assert drawn == Participation(clients, fraction, seed).draw(round_index)
    turns = participation.turns(round_index, Simulated(world)[0])
    played = [client for turn in turns for client in turn if client is not None]
    assert sorted(played) == drawn
    for turn in turns:
        assert all(c is None or c % world == rank for rank, c in enumerate(turn))
    assert any(c is not None for c in turns[-1])


def test_every_client_is_drawn_equally_often() -> None:
    participation = Participation(clients=50, fraction=0.5, seed=3)
    counts = Counter(c for r in range(2000) for c in participation.draw(r))
    # Binomial(2000, 1/2): six deviations are 134.
    assert all(abs(counts[c] - 1000) < 134 for c in range(50))
    assert participation.draw(0) != participation.draw(1)
    assert participation.draw(0) != Participation(50, 0.5, seed=4).draw(0)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"clients": 0}, "clients must be an integer of at least 1, got 0"),
        ({"clients": 5, "fraction": 0.0}, r"fraction must lie in \(0, 1\], got 0.0"),
        ({"clients": 5, "fraction": 1.5}, r"must lie in \(0, 1\], got 1.5"),
    ],
    ids=str,
)
def test_participation_that_draws_nobody_is_refused(
    arguments: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        Participation(**arguments)


@given(sizes=st.lists(st.integers(0, 1000), min_size=1, max_size=40), data=st.data())
def test_fragments_are_a_balanced_partition(sizes: list[int], data: st.DataObject) -> None:
    count = data.draw(st.integers(1, len(sizes)))
    parts = cut(sizes, count)
    assert sorted(i for part in parts for i in part) == list(range(len(sizes)))
    assert len(parts) == count
    assert all(parts)
    weights = [sum(max(1, sizes[i]) for i in part) for part in parts]
    assert max(weights) - min(weights) <= max(max(sizes), 1)


def test_a_fraction_draws_what_it_says() -> None:
    assert len(Participation(100, 0.07).draw(0)) == 7
    assert len(Participation(1000, 0.029).draw(0)) == 29
    assert len(Participation(10, 0.01).draw(0)) == 1


@pytest.mark.parametrize("weights", [(1.0, 2.0), (0.0,) * 3, (1.0, -1.0, 1.0), (1.0, 2.0, INF)])
def test_weights_are_a_number_for_each_client(weights: tuple[float, ...]) -> None:
    with pytest.raises(ValueError, match="weights"):
        Participation(3, weights=weights)
