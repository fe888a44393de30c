"""The places of the largest of each block: as many as asked for, ascending, and none larger."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from comm_hooks.kernels import top_k
from comm_hooks.kernels.top_k import block_top_k, reference_block_top_k
from tests.kernels.vectors import matrices

sizes = st.one_of(st.integers(1, 40), st.sampled_from([63, 64, 100, 257, 1000, 4096]))
pieces = st.sampled_from([1, 500, top_k._PIECE])


def check(vectors: torch.Tensor, count: int) -> torch.Tensor:
    """Return the places, after comparing what is there with what the reference finds."""
    places = block_top_k(vectors, count)
    reference = reference_block_top_k(vectors, count)
    assert places.dtype == reference.dtype == torch.int64
    assert places.shape == reference.shape
    assert (places >= 0).all()
    assert (places < vectors.shape[2]).all()
    assert (places.diff(dim=2) > 0).all()
    magnitudes = vectors.abs()
    found, expected = (magnitudes.gather(2, p).sort(dim=2).values for p in (places, reference))
    assert torch.equal(found, expected)
    return places


@given(data=st.data(), piece=pieces)
def test_equals_the_reference_up_to_ties(data: st.DataObject, piece: int) -> None:
    blocks, size = data.draw(st.integers(1, 7)), data.draw(sizes)
    matrix = data.draw(matrices(st.integers(1, 3), st.just(blocks * size)))
    count = data.draw(st.one_of(st.integers(1, size), st.integers(1, -(-size // 16))))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(top_k, "_PIECE", piece)
        check(matrix.reshape(len(matrix), blocks, size), count)


@pytest.mark.parametrize("count", [1, 64, 512, 4095, 4096])
def test_several_pieces_of_large_blocks(count: int) -> None:
    vectors = torch.randn(2, 50, 4096, generator=torch.Generator().manual_seed(0))
    vectors[1, ::3] = 0
    vectors[0, 7, 100:] = 0
    vectors[0, 8] = vectors[0, 8].bfloat16()
    check(vectors, count)


def test_the_largest_block() -> None:
    check(torch.randn(1, 3, 65536, generator=torch.Generator().manual_seed(1)), 1000)


def test_the_first_of_equal_ones_are_taken() -> None:
    """More ties than are missing, at the bound that is found first and above it."""
    vectors = torch.ones(1, 1, 64)
    assert block_top_k(vectors, 3).tolist() == [[[0, 1, 2]]]
    vectors[0, 0, 40] = -2.0
    assert block_top_k(vectors, 3).tolist() == [[[0, 1, 40]]]
    vectors[0, 0, [5, 6, 37, 38, 50]] = torch.tensor([3.0, -3.0, 3.0, 3.0, 4.0])
    assert block_top_k(vectors, 3).tolist() == [[[5, 6, 50]]]


def test_rows_that_tie_leave_others_alone() -> None:
    vectors = torch.zeros(1, 3, 128)
    vectors[0, 1] = torch.arange(128.0)
    vectors[0, 2, 9:12] = torch.tensor([1.0, -1.0, 1.0])
    places = check(vectors, 2)
    assert places.tolist() == [[[0, 1], [126, 127], [9, 10]]]


def test_neighbours_and_elements_far_apart_are_found() -> None:
    """All of the largest in one group of the lower bound, then each in a group of its own."""
    for step in (1, 8, 64, 512):
        vectors = torch.rand(1, 2, 4096, generator=torch.Generator().manual_seed(2))
        vectors[..., step // 2 : step // 2 + 8 * step : step] += 2
        check(vectors, 8)
        check(vectors, 9)


def test_nan_counts_as_largest_and_infinity_follows() -> None:
    vectors = torch.randn(2, 3, 512, generator=torch.Generator().manual_seed(3))
    vectors[1, 1, 100] = float("nan")
    vectors[1, 1, 17] = -float("inf")
    vectors[1, 1, 300] = -float("nan")
    places = block_top_k(vectors, 3)
    assert places[1, 1].tolist() == [17, 100, 300]
    vectors[:] = float("nan")
    assert block_top_k(vectors, 4)[1, 2].tolist() == [0, 1, 2, 3]


def test_the_vectors_are_not_changed() -> None:
    vectors = torch.randn(2, 3, 512, generator=torch.Generator().manual_seed(4))
    before = vectors.clone()
    block_top_k(vectors, 5)
    assert torch.equal(vectors, before)
