"""Codes between a block's extremes: the fast path is the reference, draws included."""

import torch
from hypothesis import given
from hypothesis import strategies as st

from comm_hooks.kernels.min_max import (
    decode_min_max,
    encode_min_max,
)
from tests.kernels.vectors import cut_into, piece_sizes, sizes, vectors

widths = st.sampled_from([1, 2, 4, 8])


@given(rows=vectors, size=sizes, bits=widths, piece=piece_sizes, seeded=st.booleans())
def test_encoding_is_the_reference(
    rows: torch.Tensor, size: int, bits: int, piece: int, seeded: bool
) -> None:
    seeds = range(5, 5 + len(rows)) if seeded else None
    before = rows.clone()
    with cut_into(piece):
        parts = encode_min_max(rows, size, bits, seeds)
    assert torch.equal(rows, before)
    for actual, expected in zip(
        parts, encode_min_max.reference(rows, size, bits, seeds), strict=True
    ):
        assert torch.equal(actual, expected)


@given(
    rows=vectors,
    size=sizes,
    bits=widths,
    piece=piece_sizes,
    alpha=st.sampled_from([1.0, -1.0, 0.3]),
    add=st.booleans(),
)
def test_decoding_is_the_reference(
    rows: torch.Tensor, size: int, bits: int, piece: int, alpha: float, add: bool
) -> None:
    low, unit, octets = encode_min_max.reference(rows, size, bits)
    # As in a payload, where other bytes may follow.
    octets = torch.nn.functional.pad(octets, (0, 3), value=255)
    out, expected = rows.clone(), rows.clone()
    with cut_into(piece):
        decode_min_max(out, low, unit, octets, size, bits, alpha=alpha, add=add)
    decode_min_max.reference(expected, low, unit, octets, size, bits, alpha=alpha, add=add)
    assert torch.equal(out, expected)


@given(rows=vectors, size=sizes, bits=widths)
def test_no_element_is_off_by_more_than_half_a_unit(
    rows: torch.Tensor, size: int, bits: int
) -> None:
    low, unit, octets = encode_min_max(rows, size, bits)
    out = torch.empty(rows.shape)
    decode_min_max(out, low, unit, octets, size, bits, alpha=1.0, add=False)
    units = unit.repeat_interleave(size, dim=1)[:, : rows.shape[1]]
    # A unit may be too small for a float32.
    assert ((out - rows).abs() <= 0.5001 * units + 1e-6 * rows.abs() + 1e-44).all()


def test_the_range_of_a_shorter_last_block_is_its_own() -> None:
    low, unit, _ = encode_min_max(torch.tensor([[1.0, 4.0, -2.0, 7.0, 8.0]]), 3, 1)
    assert low.tolist() == [[-2.0, 7.0]]
    assert unit.tolist() == [[6.0, 1.0]]


def test_not_finite_blocks_leave_others_alone() -> None:
    rows = torch.ones(1, 12)
    rows[0, 5], rows[0, 9] = float("inf"), float("nan")
    low, unit, octets = encode_min_max(rows, 4, 4)
    decode_min_max(rows, low, unit, octets, 4, 4, alpha=1.0, add=False)
    assert rows[0, :4].tolist() == [1.0] * 4
    assert not rows[0, 4:].isfinite().all()
