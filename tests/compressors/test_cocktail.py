"""Cocktail: what is drawn, what of it is sent, and that every element has its turn."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from comm_hooks import Cocktail
from comm_hooks.randomness import stratified_indices

keys = st.integers(0, 2**64 - 1)


def gaussian(numel: int) -> torch.Tensor:
    return torch.randn(numel, generator=torch.Generator().manual_seed(numel))


def through(compressor: Cocktail, vector: torch.Tensor, key: int) -> torch.Tensor:
    return compressor.decompress(compressor.compress(vector, key=key), vector.numel(), key=key)


@given(key=keys, numel=st.integers(1, 3000), mask=st.floats(0.01, 1))
def test_sends_the_largest_of_what_was_drawn(key: int, numel: int, mask: float) -> None:
    vector = gaussian(numel)
    drawn = stratified_indices([key], numel, max(1, round(mask * numel)))[0][0]
    order = np.argsort(-np.abs(vector.numpy()[drawn]), kind="stable")
    kept = drawn[order[: math.ceil(0.2 * drawn.size)]]
    expected = torch.zeros(numel)
    expected[kept] = vector[kept]
    cocktail = Cocktail(mask=mask, density=0.2, value_bits=32)
    assert torch.equal(through(cocktail, vector, key), expected)


@given(key=keys)
def test_what_was_not_drawn_does_not_matter_nor_does_the_rank(key: int) -> None:
    vector, numel = gaussian(500), 500
    other = torch.full_like(vector, 1e9)
    drawn = torch.from_numpy(stratified_indices([key], numel, 50)[0][0])
    other[drawn] = vector[drawn]
    cocktail = Cocktail()
    payload = cocktail.compress(vector, key=key, rank=0, world_size=2)
    assert torch.equal(cocktail.compress(other, key=key, rank=1, world_size=2), payload)


@pytest.mark.slow
def test_every_element_has_its_turn_as_often() -> None:
    numel, draws = 200, 3000
    cocktail = Cocktail(mask=0.1, density=1.0, value_bits=32)
    ones = torch.ones(numel)
    counts = torch.stack([through(cocktail, ones, key) for key in range(draws)]).sum(0)
    assert counts.sum() == draws * 20
    # 200 elements at once: 5 standard deviations happen once in 9000 such tests by chance.
    assert (counts - draws * 0.1).abs().max() < 5 * math.sqrt(draws * 0.1 * 0.9)
