"""The largest of each block: as many as asked for, ascending, and none larger."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from comm_hooks.kernels import top_k
from comm_hooks.kernels.residual import Residual
from comm_hooks.kernels.top_k import block_top_k
from tests.kernels.vectors import matrices

sizes = st.one_of(st.integers(1, 40), st.sampled_from([63, 64, 100, 257, 1000, 4096]))
pieces = st.sampled_from([1, 500, top_k._PIECE])


def check(rows: torch.Tensor, size: int, count: int) -> torch.Tensor:
    """Return the places, after comparing them and what is there with what the reference finds."""
    before = rows.clone()
    places, values = block_top_k(rows, size, count)
    reference, expected = block_top_k.reference(rows, size, count)
    assert places.dtype == torch.int64
    assert torch.equal(places, reference)
    assert torch.equal(values, expected)
    assert torch.equal(rows, before)
    return places


@given(data=st.data(), piece=pieces)
def test_equals_the_reference(data: st.DataObject, piece: int) -> None:
    """Full blocks and tails, rows that are strided, ties."""
    size = data.draw(sizes)
    numels = st.one_of(st.integers(1, 7).map(lambda n: n * size), st.integers(1, 7 * size))
    matrix = data.draw(matrices(st.integers(1, 3), numels))
    count = data.draw(st.one_of(st.integers(1, size), st.integers(1, -(-size // 16))))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(top_k, "_PIECE", piece)
        check(matrix, size, count)


@given(data=st.data(), piece=pieces, dtype=st.sampled_from([torch.float32, torch.bfloat16]))
def test_residuals_are_added_first(data: st.DataObject, piece: int, dtype: torch.dtype) -> None:
    """By one factor or one for each row, to rows that are pieces or not."""
    size, n = data.draw(sizes), data.draw(st.integers(1, 3))
    numel = data.draw(st.one_of(st.integers(1, 7).map(lambda n: n * size), st.integers(1, 99)))
    rows, vectors = (data.draw(matrices(st.just(n), st.just(numel))) for _ in range(2))
    # Powers of two: torch may round a product and a sum in one go.
    factor = data.draw(st.sampled_from([1.0, 2.0, torch.tensor([[1.0], [0.0], [-0.5]])[:n]]))
    residual = Residual(vectors.to(dtype).contiguous(), factor)
    expected_rows = rows.clone()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(top_k, "_PIECE", piece)
        found = block_top_k(rows, size, min(3, size), residual)
    expected = block_top_k.reference(expected_rows, size, min(3, size), residual)
    assert torch.equal(rows, expected_rows)
    assert torch.equal(found[0], expected[0])
    assert torch.equal(found[1], expected[1])


@pytest.mark.parametrize("count", [1, 64, 512, 4095, 4096])
def test_several_pieces_of_large_blocks(count: int) -> None:
    vectors = torch.randn(2, 50, 4096, generator=torch.Generator().manual_seed(0))
    vectors[1, ::3] = 0
    vectors[0, 7, 100:] = 0
    vectors[0, 8] = vectors[0, 8].bfloat16()
    check(vectors.flatten(1), 4096, count)


def test_the_largest_block() -> None:
    check(torch.randn(1, 3 * 65536, generator=torch.Generator().manual_seed(1)), 65536, 1000)


def test_the_first_of_equal_ones_are_taken() -> None:
    """More ties than are missing, at the bound that is found first and above it."""
    rows = torch.ones(1, 64)
    assert check(rows, 64, 3).tolist() == [[[0, 1, 2]]]
    rows[0, 40] = -2.0
    assert check(rows, 64, 3).tolist() == [[[0, 1, 40]]]
    rows[0, [5, 6, 37, 38, 50]] = torch.tensor([3.0, -3.0, 3.0, 3.0, 4.0])
    assert check(rows, 64, 3).tolist() == [[[5, 6, 50]]]


def test_rows_that_tie_leave_others_alone() -> None:
    vectors = torch.zeros(1, 3, 128)
    vectors[0, 1] = torch.arange(128.0)
    vectors[0, 2, 9:12] = torch.tensor([1.0, -1.0, 1.0])
    places = check(vectors.flatten(1), 128, 2)
    assert places.tolist() == [[[0, 1], [126, 127], [9, 10]]]


def test_neighbours_and_elements_far_apart_are_found() -> None:
    """All of the largest in one group of the lower bound, then each in a group of its own."""
    for step in (1, 8, 64, 512):
        vectors = torch.rand(1, 2, 4096, generator=torch.Generator().manual_seed(2))
        vectors[..., step // 2 : step // 2 + 8 * step : step] += 2
        check(vectors.flatten(1), 4096, 8)
        check(vectors.flatten(1), 4096, 9)


def test_nan_counts_as_largest_and_infinity_follows() -> None:
    vectors = torch.randn(2, 3, 512, generator=torch.Generator().manual_seed(3))
    vectors[1, 1, 100] = float("nan")
    vectors[1, 1, 17] = -float("inf")
    vectors[1, 1, 300] = -float("nan")
    rows = vectors.view(2, -1)
    places, _ = block_top_k(rows, 512, 3)
    assert places[1, 1].tolist() == [17, 100, 300]
    rows.fill_(float("nan"))
    places, _ = block_top_k(rows, 512, 4)
    assert places[1, 2].tolist() == [0, 1, 2, 3]
