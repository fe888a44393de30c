"""Signs and scales: the fast path is the reference, and what is subtracted is what is decoded."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from comm_hooks.kernels import signs
from comm_hooks.kernels.residual import Residual
from comm_hooks.kernels.signs import (
    decode_signs,
    encode_signs,
    mean_magnitudes,
)
from tests.kernels.vectors import cut_into, matrices, piece_sizes, sizes, vectors


@given(rows=vectors, size=sizes, piece=piece_sizes)
def test_encoding_is_the_reference(rows: torch.Tensor, size: int, piece: int) -> None:
    with cut_into(piece):
        scales, octets = encode_signs(rows, size)
    expected_scales, expected_octets = encode_signs.reference(rows, size)
    assert scales.shape == expected_scales.shape == (len(rows), -(-rows.shape[1] // size))
    # Sums of another order.
    torch.testing.assert_close(scales, expected_scales, rtol=1e-5, atol=0)
    assert torch.equal(octets, expected_octets)


@given(
    rows=vectors,
    size=sizes,
    piece=piece_sizes,
    alpha=st.sampled_from([1.0, -1.0, 0.25]),
    add=st.booleans(),
)
def test_decoding_is_the_reference(
    rows: torch.Tensor, size: int, piece: int, alpha: float, add: bool
) -> None:
    scales, octets = encode_signs.reference(rows, size)
    # As in a payload, where other bytes may follow.
    octets = torch.nn.functional.pad(octets, (0, 3), value=255)
    out, expected = rows.clone(), rows.clone()
    with cut_into(piece):
        decode_signs(out, scales[None], octets[None], size, alpha=alpha, add=add)
    decode_signs.reference(expected, scales[None], octets[None], size, alpha=alpha, add=add)
    assert torch.equal(out, expected)


@given(
    data=st.data(),
    ranks=st.integers(1, 20),
    rows=st.integers(1, 3),
    size=sizes,
    at_once=st.sampled_from([0, 8, 9, 100]),
    alpha=st.sampled_from([1.0, -1 / 3]),
    add=st.booleans(),
)
def test_a_sum_is_that_of_rank_after_rank(
    data: st.DataObject,
    ranks: int,
    rows: int,
    size: int,
    at_once: int,
    alpha: float,
    add: bool,
) -> None:
    sent = data.draw(matrices(st.just(ranks * rows), st.integers(1, 100)))
    numel = sent.shape[1]
    scales, octets = (part.unflatten(0, (ranks, rows)) for part in encode_signs(sent, size))
    out, expected = torch.ones(2, rows, numel)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(signs, "PIECE", at_once * out.numel())
        decode_signs(out, scales, octets, size, alpha=alpha, add=add)
    decode_signs.reference(expected, scales, octets, size, alpha=alpha, add=add)
    assert torch.equal(out, expected)


@given(rows=vectors, size=sizes, piece=piece_sizes)
def test_what_is_subtracted_is_what_is_decoded(rows: torch.Tensor, size: int, piece: int) -> None:
    left, expected = rows.clone(), rows.clone()
    with cut_into(piece):
        scales, octets = encode_signs(left, size, subtract=True)
    unchanged, same = encode_signs(rows, size)
    assert torch.equal(scales, unchanged)
    assert torch.equal(octets, same)
    decode_signs.reference(expected, scales[None], octets[None], size, alpha=-1.0, add=True)
    assert torch.equal(left, expected)


@given(data=st.data(), rows=vectors, size=sizes, piece=piece_sizes, subtract=st.booleans())
def test_residuals_are_added_first(
    data: st.DataObject, rows: torch.Tensor, size: int, piece: int, subtract: bool
) -> None:
    n, numel = rows.shape
    added = data.draw(matrices(st.just(n), st.just(numel)))
    # Powers of two: torch may round a product and a sum in one go.
    powers = torch.tensor([1.0, 0.0, -0.5]).repeat(n)[:n, None]
    residual = Residual(added, data.draw(st.sampled_from([1.0, powers])))
    found, expected = rows.clone(), rows.clone()
    residual.add_to(expected)
    with cut_into(piece):
        coded = encode_signs(found, size, residual=residual, subtract=subtract)
        reference = encode_signs(expected, size, subtract=subtract)
    assert torch.equal(found, expected)
    assert torch.equal(coded[0], reference[0])
    assert torch.equal(coded[1], reference[1])


@given(rows=vectors, size=sizes, piece=piece_sizes, subtract=st.booleans())
def test_scales_may_be_given(rows: torch.Tensor, size: int, piece: int, subtract: bool) -> None:
    scales = torch.arange(1.0, 1 + len(rows) * -(-rows.shape[1] // size)).view(len(rows), -1)
    left, expected = rows.clone(), rows.clone()
    with cut_into(piece):
        coded = encode_signs(left, size, subtract=subtract, scales=scales)
    reference = encode_signs.reference(expected, size, subtract=subtract, scales=scales)
    assert torch.equal(left, expected)
    assert torch.equal(coded[0], scales)
    assert torch.equal(coded[1], reference[1])


@pytest.mark.parametrize("power", [1, 2])
def test_mean_magnitudes(power: int) -> None:
    rows = torch.tensor([[3.0, -4.0, 0.0, 1.0, -2.0], [0.0] * 5])
    blocks = [[(3.0, -4.0), (0.0, 1.0), (-2.0,)], [(0.0, 0.0), (0.0, 0.0), (0.0,)]]
    expected = [
        [(sum(abs(x) ** power for x in block) / len(block)) ** (1 / power) for block in row]
        for row in blocks
    ]
    torch.testing.assert_close(mean_magnitudes(rows, 2, power=power), torch.tensor(expected))


def test_strided_rows_are_subtracted_from_in_place() -> None:
    whole = torch.randn(3, 2000, generator=torch.Generator().manual_seed(0))
    before = whole.clone()
    encode_signs(whole[:, ::2], 64, subtract=True)
    expected = before[:, ::2].clone()
    encode_signs(expected, 64, subtract=True)
    assert torch.equal(whole[:, ::2], expected)
    assert torch.equal(whole[:, 1::2], before[:, 1::2])


def test_zeros_of_both_signs_are_positive_and_nan_is_not() -> None:
    row = torch.tensor([[0.0, -0.0, 1.0, -1.0, float("nan"), float("inf"), -float("inf")]])
    scales, octets = encode_signs(row, 4)
    assert octets.tolist() == [[0b0100111]]
    assert scales[0, 0] == 0.5
    assert scales[0, 1].isnan()


def test_a_block_that_is_not_finite_leaves_others_alone() -> None:
    rows = torch.ones(1, 12)
    rows[0, 5] = float("inf")
    scales, octets = encode_signs(rows, 4)
    assert scales.tolist() == [[1.0, float("inf"), 1.0]]
    decode_signs(rows, scales[None], octets[None], 4, alpha=1.0, add=False)
    assert rows[0, :4].tolist() == rows[0, 8:].tolist() == [1.0] * 4


def test_the_scale_of_a_shorter_last_block_is_its_own_mean() -> None:
    scales, _ = encode_signs(torch.tensor([[1.0, -3.0, 5.0, -7.0, 10.0]]), 4)
    assert scales.tolist() == [[4.0, 10.0]]
