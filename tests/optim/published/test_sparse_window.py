"""SparseWindow holds whatever TopK's means can be, on every route and any number of ranks."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from comm_hooks import Exchange, TopK
from comm_hooks.collectives import Simulated
from comm_hooks.optim.published.sparse_window import SparseWindow


def means_of(top_k: TopK, ranks: int, shape: tuple[int, int], sharded: bool) -> torch.Tensor:
    """Exchange random vectors that overlap in part, with many zeros and equal magnitudes."""
    world = Simulated(ranks)
    collective = "sharded" if sharded else "all_gather"
    exchanges = [Exchange(top_k, None, collective, min_numel=1, transport=t) for t in world]
    generator = torch.Generator().manual_seed(shape[1])
    shared = torch.randn(shape, generator=generator)
    vectors = []
    for _ in range(ranks):
        own = torch.randn(shape, generator=generator).mul_(2)
        own[torch.rand(shape, generator=generator) < 0.5] = 0
        vectors.append({"rows": torch.where(shared > 1, shared, own)})
    world.run([e.round(v) for e, v in zip(exchanges, vectors, strict=True)])
    return vectors[0]["rows"].view(1, -1)


@given(
    shape=st.tuples(st.integers(2, 40), st.integers(1, 40)),
    ranks=st.integers(1, 4),
    density=st.floats(0.01, 1),
    block_size=st.integers(1, 600),
    value_bits=st.sampled_from([1, 2, 3, 4, 16, 32]),
    sharded=st.booleans(),
)
@pytest.mark.filterwarnings("ignore:world size is 1")
def test_means_of_topk_fit_and_come_back(
    shape: tuple[int, int],
    ranks: int,
    density: float,
    block_size: int,
    value_bits: int,
    sharded: bool,
) -> None:
    top_k = TopK(density, block_size, value_bits)
    mean = means_of(top_k, ranks, shape, sharded)
    window = SparseWindow.of(top_k, mean.numel(), ranks, sharded=sharded)
    octets = window.encode(mean)
    assert octets.shape == (1, window.nbytes)
    places, values = window.decode(octets)
    assert 0 <= int(places.min()) <= int(places.max()) < mean.numel()
    back = torch.zeros_like(mean).scatter_add_(1, places, values)
    assert torch.equal(back != 0, mean != 0), "there must be room for every element"
    if value_bits == 4 and (sharded or ranks == 1):
        torch.testing.assert_close(back, mean, rtol=2**-8, atol=0)
    elif value_bits == 32 or sharded or ranks == 1:
        assert torch.equal(back, mean)
    else:
        assert torch.equal(back, mean.bfloat16().float())


@pytest.mark.filterwarnings("ignore:world size is 1")
def test_four_bits_are_not_rounded_again() -> None:
    top_k = TopK(0.2, 128, 4)
    for ranks, sharded in ((1, False), (3, True)):
        mean = means_of(top_k, ranks, (30, 40), sharded)
        window = SparseWindow.of(top_k, mean.numel(), ranks, sharded=sharded)
        assert window.value_bits == 4
        places, values = window.decode(window.encode(mean))
        assert torch.equal(torch.zeros_like(mean).scatter_add_(1, places, values), mean)


@given(numel=st.integers(6, 500), window=st.integers(1, 6), count=st.integers(1, 3), data=st.data())
def test_moments_are_weighted_sums(
    numel: int, window: int, count: int, data: st.DataObject
) -> None:
    code = SparseWindow(numel, shards=2, block_size=100, capacity=3, value_bits=32)
    weights = data.draw(st.lists(st.floats(-2, 2), min_size=window, max_size=window))
    squares = data.draw(st.lists(st.floats(0, 2), min_size=window, max_size=window))
    rng = np.random.default_rng(numel)
    vectors = np.zeros((count, window, numel), dtype=np.float32)
    for vector in vectors.reshape(-1, numel):
        vector[rng.integers(0, numel, 2)] = rng.normal(size=2)
    rows = [code.encode(torch.from_numpy(vectors[:, row])) for row in range(window)]
    first, second = code.moments(torch.stack(rows, dim=1), weights, squares)
    np.testing.assert_allclose(first, np.einsum("nmd,m->nd", vectors, weights), atol=1e-5)
    np.testing.assert_allclose(second, np.einsum("nmd,m->nd", vectors**2, squares), atol=1e-4)


@pytest.mark.parametrize(
    ("value_bits", "ranks", "sharded", "bits_of_value", "kept"),
    [(16, 1, False, 16, 41), (16, 2, False, 16, 82), (16, 2, True, 16, 41), (4, 2, True, 4, 41),
     (4, 2, False, 16, 82), (1, 2, True, 16, 41), (32, 1, False, 32, 41)],
)  # fmt: skip
def test_an_element_takes_its_value_and_few_bits_for_its_place(
    value_bits: int, ranks: int, sharded: bool, bits_of_value: int, kept: int
) -> None:
    numel = 1 << 20
    window = SparseWindow.of(TopK(0.01, value_bits=value_bits), numel, ranks, sharded=sharded)
    elements = kept * numel // 4096
    place = 2 + math.log2(4096 / kept)
    # Two levels for each block of 4-bit values, and one bit more where log2 is rounded.
    assert window.nbytes * 8 <= elements * (bits_of_value + place + 1 + 32 / kept)
