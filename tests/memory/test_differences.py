"""Differences on their own: what is sent, what is remembered, where it moves."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from comm_hooks import Compressor, Differences, Exchange, Quantize, RandomK, Sign, TopK
from comm_hooks.collectives import Simulated
from comm_hooks.memory.rows import Rows
from tests.compressors.catalog import representative

CONTRACTIVE = [
    Sign(block_size=32),
    TopK(density=0.1, value_bits=32),
    TopK(density=0.2, value_bits=1),
    Quantize(bits=4, block_size=64),
    RandomK(density=0.2, unbiased=False),
]


def test_the_estimate_is_the_sum_of_what_was_sent() -> None:
    memory, place = Differences(), Rows(("a", "b"), torch.zeros(2, 600))
    every, total = torch.ones(2, 1, dtype=torch.bool), torch.zeros(2, 600)
    for fraction in (0.5, 0.0, 1.0, 0.25):
        vectors = place.matrix.normal_().clone()
        memory.compensate(place, every, 1.0)
        torch.testing.assert_close(place.matrix, vectors - total)
        total += fraction * place.matrix
        place.matrix.mul_(1 - fraction)
        memory.retain(place, every, 1.0, key=0)
        torch.testing.assert_close(torch.stack([*memory.state_dict().values()]), total)
        assert abs(memory.norm() - float(total.norm())) < 1e-3


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


@pytest.mark.parametrize("compressor", representative(CONTRACTIVE))
@given(seed=st.integers(0, 2**32), ranks=st.integers(2, 4))
def test_the_receivers_have_the_mean_of_the_estimates(
    compressor: Compressor, seed: int, ranks: int
) -> None:
    generator = torch.Generator().manual_seed(seed)
    gradients = [[torch.randn(3, 40, generator=generator) for _ in range(ranks)] for _ in range(3)]
    total, kept = aggregate(compressor, "all_gather", gradients)
    torch.testing.assert_close(total, torch.stack(kept).mean(0), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("collective", ["all_gather", "sharded"])
@pytest.mark.parametrize("compressor", representative(CONTRACTIVE))
def test_constant_gradients_become_known(compressor: Compressor, collective: str) -> None:
    generator = torch.Generator().manual_seed(0)
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
