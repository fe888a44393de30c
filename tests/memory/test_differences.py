"""Differences on their own: what is sent, what is remembered, where it moves."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from comm_hooks import Compressor, Differences, Exchange, Identity, Quantize, RandomK, Sign, TopK
from comm_hooks.collectives import Simulated
from comm_hooks.memory.rows import Rows

CONTRACTIVE = [
    Identity(),
    Sign(block_size=32),
    TopK(density=0.1, value_bits=32),
    TopK(density=0.2, value_bits=1),
    Quantize(bits=4, block_size=64),
    RandomK(density=0.2, unbiased=False),
]


def rows(*names: str, numel: int = 600) -> Rows:
    return Rows(names, torch.zeros(len(names), numel))


def everything(where: Rows) -> torch.Tensor:
    return torch.ones(len(where.names), 1, dtype=torch.bool)


def play(
    memory: Differences, where: Rows, vectors: torch.Tensor, sent: float, accept: torch.Tensor
) -> torch.Tensor:
    """Play a round in which a fraction of the difference is sent; return the difference."""
    where.matrix.copy_(vectors)
    memory.compensate(where, everything(where), 1.0)
    differences = where.matrix.clone()
    where.matrix.mul_(1 - sent)
    memory.retain(where, accept, 1.0, key=0)
    return differences


def estimates(memory: Differences, where: Rows) -> torch.Tensor:
    """Return what the memory takes the vectors to be."""
    where.matrix.zero_()
    memory.compensate(where, everything(where), 1.0)
    return -where.matrix


def test_the_estimate_is_the_sum_of_what_was_sent() -> None:
    memory, place = Differences(), rows("a", "b")
    total = torch.zeros(2, 600)
    for fraction in (0.5, 0.0, 1.0, 0.25):
        vectors = torch.randn(2, 600)
        differences = play(memory, place, vectors, fraction, everything(place))
        torch.testing.assert_close(differences, vectors - total)
        total += fraction * differences
        torch.testing.assert_close(estimates(memory, place), total)
        assert abs(memory.norm() - float(total.norm())) < 1e-3


def test_a_round_that_is_not_accepted_changes_nothing() -> None:
    memory, place = Differences(), rows("a", "b")
    play(memory, place, torch.randn(2, 600), 0.5, everything(place))
    before = estimates(memory, place)
    bad = torch.randn(2, 600)
    bad[0, 3] = float("nan")
    play(memory, place, bad, 0.5, torch.tensor([[False], [False]]))
    assert torch.equal(estimates(memory, place), before)
    play(memory, place, torch.ones(2, 600), 1.0, torch.tensor([[False], [True]]))
    after = estimates(memory, place)
    assert torch.equal(after[0], before[0])
    torch.testing.assert_close(after[1], torch.ones(600))


def test_estimates_follow_their_names_into_another_layout() -> None:
    memory, before = Differences(), rows("a", "b", "c")
    play(memory, before, torch.randn(3, 600), 1.0, everything(before))
    stored = estimates(memory, before)
    assert torch.equal(
        estimates(memory, rows("c", "new")), torch.stack([stored[2], torch.zeros(600)])
    )
    assert torch.equal(estimates(memory, rows("b", "a")), stored[[1, 0]])


def test_state_survives_saving(tmp_path: object) -> None:
    memory, place = Differences(), rows("a", "b")
    play(memory, place, torch.randn(2, 600), 0.5, everything(place))
    saved = estimates(memory, place)
    torch.save(memory.state_dict(), f"{tmp_path}/state.pt")
    restored = Differences()
    restored.load_state_dict(torch.load(f"{tmp_path}/state.pt", weights_only=True))
    assert torch.equal(estimates(restored, rows("b", "a")), saved[[1, 0]])

    play(memory, place, torch.randn(2, 600), 0.5, everything(place))
    assert not torch.equal(estimates(memory, place), saved)
    memory.load_state_dict(restored.state_dict())
    assert torch.equal(estimates(memory, place), saved), "a rollback in place"


def test_foreign_state_is_refused_and_changes_nothing() -> None:
    memory, place = Differences(), rows("a")
    play(memory, place, torch.ones(1, 600), 1.0, everything(place))
    with pytest.raises(ValueError, match=r"saved residual of 'a' is torch\.float16"):
        memory.load_state_dict({"a": torch.zeros(600, dtype=torch.float16)})
    assert estimates(memory, place).unique().tolist() == [1]
    with pytest.raises(ValueError, match="residual of 'a' has 600 elements"):
        estimates(memory, rows("a", numel=700))


def test_another_clients_memory_is_empty() -> None:
    memory, place = Differences(), rows("a")
    play(memory, place, torch.ones(1, 600), 1.0, everything(place))
    assert memory.fresh().norm() == 0
    assert memory.for_server().norm() == 0
    assert memory.norm() > 0


def aggregate(
    compressor: Compressor, collective: str, gradients: list[list[torch.Tensor]]
) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """Exchange the gradients of each round, one per rank.

    Return the sum of what the rounds returned, and each rank's estimate.
    """
    world = Simulated(len(gradients[0]))
    exchanges = [
        Exchange(compressor, Differences(), collective, min_numel=1, transport=t)  # type: ignore[arg-type]
        for t in world
    ]
    total = torch.zeros_like(gradients[0][0])
    for own in gradients:
        messages = [{"w": gradient.clone()} for gradient in own]
        world.run([e.round(m) for e, m in zip(exchanges, messages, strict=True)])
        assert all(torch.equal(m["w"], messages[0]["w"]) for m in messages)
        total += messages[0]["w"]
    kept = [e.memory.state_dict()["w"].view_as(total) for e in exchanges if e.memory]
    return total, kept


@pytest.mark.parametrize("compressor", CONTRACTIVE, ids=str)
@given(seed=st.integers(0, 2**32), ranks=st.integers(2, 4))
@settings(max_examples=15)
def test_the_receivers_have_the_mean_of_the_estimates(
    compressor: Compressor, seed: int, ranks: int
) -> None:
    generator = torch.Generator().manual_seed(seed)
    gradients = [[torch.randn(3, 40, generator=generator) for _ in range(ranks)] for _ in range(3)]
    total, kept = aggregate(compressor, "all_gather", gradients)
    torch.testing.assert_close(total, torch.stack(kept).mean(0), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("collective", ["all_gather", "sharded"])
@pytest.mark.parametrize("compressor", CONTRACTIVE, ids=str)
@given(seed=st.integers(0, 2**32))
@settings(max_examples=3)
def test_constant_gradients_become_known(
    compressor: Compressor, collective: str, seed: int
) -> None:
    generator = torch.Generator().manual_seed(seed)
    gradients = [torch.randn(3, 40, generator=generator) for _ in range(2)]
    total, kept = aggregate(compressor, collective, [gradients] * 60)
    for gradient, estimate in zip(gradients, kept, strict=True):
        assert (estimate - gradient).norm() < 0.02 * gradient.norm()
    mean = torch.stack(gradients).mean(0)
    assert (total - mean).norm() < 0.05 * mean.norm()


@pytest.mark.parametrize("collective", ["all_gather", "sharded"])
def test_a_gradient_that_ends_is_forgotten(collective: str) -> None:
    generator = torch.Generator().manual_seed(0)
    gradients = [torch.randn(3, 40, generator=generator) for _ in range(2)]
    silence = [torch.zeros(3, 40)] * 2
    # What the ranks send ends after 10 rounds, what the servers have to pass on later.
    compressor = TopK(density=0.1, value_bits=32)
    total, kept = aggregate(compressor, collective, [gradients] * 3 + [silence] * 40)
    for estimate in kept:
        assert estimate.abs().max() < 1e-6
    assert total.abs().max() < 1e-6


@pytest.mark.parametrize("collective", ["all_gather", "sharded"])
def test_a_gradient_that_is_not_finite_keeps_all_estimates(collective: str) -> None:
    world = Simulated(2)
    exchanges = [
        Exchange(Sign(), Differences(), collective, min_numel=1, transport=t)  # type: ignore[arg-type]
        for t in world
    ]

    def exchange(*own: torch.Tensor) -> torch.Tensor:
        messages = [{"w": gradient.clone()} for gradient in own]
        world.run([e.round(m) for e, m in zip(exchanges, messages, strict=True)])
        return messages[0]["w"]

    exchange(torch.randn(4, 40), torch.randn(4, 40))
    before = [e.state_dict() for e in exchanges]
    assert exchange(torch.randn(4, 40), torch.full((4, 40), float("inf"))).isnan().all()
    for e, saved in zip(exchanges, before, strict=True):
        after = e.state_dict()
        for part in ("memory", "server_memory"):
            assert after[part].keys() == saved[part].keys()
            assert all(torch.equal(after[part][n], saved[part][n]) for n in saved[part])
