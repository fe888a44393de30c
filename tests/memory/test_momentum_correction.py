"""Momentum correction against NumPy: by itself, and in an exchange between simulated ranks."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from comm_hooks import Exchange, TopK
from comm_hooks.collectives import Simulated
from comm_hooks.memory import MomentumCorrection
from comm_hooks.memory.rows import Rows

ROUNDS, SHAPE, KEPT = 25, (12, 15), 9


def rows(*names: str, numel: int = 6) -> Rows:
    return Rows(names, torch.zeros(len(names), numel))


def run(
    memory: MomentumCorrection,
    place: Rows,
    gradients: torch.Tensor,
    sends: torch.Tensor,
    *,
    scale: float = 1.0,
    accept: bool = True,
) -> torch.Tensor:
    """Do one round in which the elements ``sends`` are sent as they are; return what is sent."""
    place.matrix.copy_(gradients * scale)
    active = (gradients != 0).any(dim=1, keepdim=True)
    memory.compensate(place, active, scale)
    sent = torch.where(sends, place.matrix, torch.zeros(()))
    place.matrix.sub_(sent)
    memory.retain(place, active & accept, scale, key=0)
    return sent / scale


def kept_largest(x: np.ndarray) -> np.ndarray:
    kept = np.zeros_like(x)
    places = np.argsort(-np.abs(x))[:KEPT]
    kept[places] = x[places]
    return kept


@pytest.mark.parametrize("momentum", [0.0, 0.9])
@pytest.mark.parametrize("ranks", [1, 3])
@pytest.mark.filterwarnings("ignore:world size is 1")
def test_rounds_follow_the_paper(momentum: float, ranks: int) -> None:
    top_k = TopK(KEPT / (SHAPE[0] * SHAPE[1]), value_bits=32)
    world = Simulated(ranks)
    exchanges = [
        Exchange(top_k, MomentumCorrection(momentum), "all_gather", min_numel=1, transport=t)
        for t in world
    ]
    rng = np.random.default_rng(ranks)
    u = np.zeros((ranks, SHAPE[0] * SHAPE[1]))
    e = np.zeros_like(u)
    for _ in range(ROUNDS):
        gradients = rng.normal(size=u.shape)
        tensors = [{"w": torch.from_numpy(g).float().view(SHAPE)} for g in gradients]
        world.run([x.round(t) for x, t in zip(exchanges, tensors, strict=True)])

        u = momentum * u + gradients
        e = e + u
        sent = np.stack([kept_largest(row) for row in e])
        e = e - sent
        u = np.where(sent != 0, 0, u)
        for tensor in tensors:
            np.testing.assert_allclose(tensor["w"].flatten(), sent.mean(axis=0), atol=1e-4)
    for rank, exchange in enumerate(exchanges):
        assert exchange.memory
        state = exchange.memory.state_dict()
        np.testing.assert_allclose(state["velocity.w"], u[rank], atol=1e-4)
        np.testing.assert_allclose(state["residual.w"], e[rank], atol=1e-4)
        assert exchange.memory.norm() == pytest.approx(float(np.linalg.norm(e[rank])), rel=1e-4)


@given(
    seed=st.integers(0, 2**20),
    momentum=st.floats(0, 0.99),
    rounds=st.integers(1, 6),
)
def test_what_is_sent_and_kept_adds_up(seed: int, momentum: float, rounds: int) -> None:
    """Sums over rounds: sent + residual = velocities, of which the masked ones start anew."""
    rng = torch.Generator().manual_seed(seed)
    memory, place = MomentumCorrection(momentum), rows("a", "b")
    velocity, velocities, sums = torch.zeros(2, 6), torch.zeros(2, 6), torch.zeros(2, 6)
    for _ in range(rounds):
        gradients = torch.randn(2, 6, generator=rng)
        sends = torch.rand(2, 6, generator=rng) < 0.3
        velocity = momentum * velocity + gradients
        velocities += velocity
        sums += run(memory, place, gradients, sends)
        velocity[sends] = 0
    state = memory.state_dict()
    residual = torch.stack([state["residual.a"], state["residual.b"]])
    torch.testing.assert_close(sums + residual, velocities, atol=1e-4, rtol=1e-4)
    assert (residual[sends] == 0).all()


def test_loss_scales_do_not_matter() -> None:
    ones, scaled = MomentumCorrection(0.5), MomentumCorrection(0.5)
    here, there = rows("a"), rows("a")
    for round_, scale in enumerate([1.0, 1024.0, 8.0]):
        gradients = torch.arange(6.0)[None] + round_ - 2.5
        sends = torch.arange(6)[None] == round_
        expected = run(ones, here, gradients, sends)
        assert torch.equal(run(scaled, there, gradients, sends, scale=scale), expected)
    assert scaled.state_dict().keys() == ones.state_dict().keys()
    assert all(torch.equal(scaled.state_dict()[k], v) for k, v in ones.state_dict().items())


def test_rounds_that_are_not_accepted_and_rows_without_gradients_change_nothing() -> None:
    memory, place = MomentumCorrection(0.9), rows("a", "b")
    nowhere = torch.zeros(2, 6, dtype=torch.bool)
    run(memory, place, torch.randn(2, 6), nowhere)
    before = memory.state_dict()
    run(memory, place, torch.randn(2, 6), ~nowhere, accept=False)
    assert all(torch.equal(before[k], v) for k, v in memory.state_dict().items())
    gradients = torch.randn(2, 6)
    gradients[1] = 0
    sent = run(memory, place, gradients, ~nowhere)
    after = memory.state_dict()
    assert not sent[1].any()
    assert all(torch.equal(before[k], after[k]) for k in ("velocity.b", "residual.b"))
    assert not after["velocity.a"].any()
    assert not after["residual.a"].any()


def test_names_that_look_like_a_part_of_the_state() -> None:
    memory = MomentumCorrection()
    names = ("residual.weight", "velocity.weight")
    run(memory, rows(*names), torch.ones(2, 6), torch.zeros(2, 6, dtype=torch.bool))
    assert memory.parameters_in(memory.state_dict()) == set(names)


@pytest.mark.parametrize("momentum", [-0.1, 1.0, float("nan")])
def test_bad_momenta_are_refused(momentum: float) -> None:
    with pytest.raises(ValueError, match=r"momentum must lie in \[0, 1\)"):
        MomentumCorrection(momentum)
