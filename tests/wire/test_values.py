"""Codes of kept values against a NumPy reference, and what they promise about the error."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from comm_hooks.wire.values import VALUE_BITS, ValueCode

COARSE = (1, 2, 3)
every_width = pytest.mark.parametrize("bits", VALUE_BITS)
# Squares of anything smaller vanish in float32, and bfloat16 rounds coarsely below 1e-38.
values = st.floats(-1e6, 1e6, width=32).map(lambda x: x if abs(x) > 1e-15 else 0.0)


def round_trip(array: np.ndarray, bits: int) -> np.ndarray:
    code, tensor = ValueCode(bits), torch.from_numpy(array).float()
    _, sets, count = tensor.shape
    octets, sent = code.encode(tensor)
    assert octets.dtype == torch.uint8
    assert octets.shape == (len(tensor), code.nbytes(sets, count))
    # What follows in a payload is none of the code's business.
    octets = torch.nn.functional.pad(octets, (0, -octets.shape[1] % 4 + 4), value=255)
    decoded = code.decode(octets, sets, count)
    assert torch.equal(decoded, sent), "what the sender keeps the rest of is what arrives"
    return decoded.double().numpy()


def bfloat16(x: np.ndarray) -> np.ndarray:
    """Round to 8 significant bits, ties to even."""
    mantissa, exponent = np.frexp(x)
    return np.ldexp(np.round(mantissa * 256) / 256, exponent)


def shared_scales(a: np.ndarray) -> np.ndarray:
    """Return the scale of each set of one row (sets, count): its group's, as it travels."""
    sets, count = a.shape
    shared = max(1, 256 // count)
    means = [a[first : first + shared].mean() for first in range(0, sets, shared)]
    largest = bfloat16(np.float32(max(means)))
    scales = []
    for mean in means:
        if mean == 0 or (steps := round(16 * np.log2(largest / mean))) >= 255:
            scales.append(0.0)
        else:
            scales.append(largest * 2 ** (-max(0, steps) / 16))
    return np.repeat(scales, shared)[:sets]


def class_means(relative: np.ndarray, bits: int) -> list[float]:
    """Return the mean of each class of one row's magnitudes over their scales."""
    classes, means = [relative.ravel()], [1.0]
    for _ in range(bits - 1):
        halves, next_means = [], []
        for members, mean in zip(classes, means, strict=True):
            for half in (members[members <= mean], members[members > mean]):
                halves.append(half)
                next_means.append(half.mean() if half.size else mean)
        classes, means = halves, next_means
    return [2 ** (np.clip(round(32 * np.log2(m)), -128, 127) / 32) if m else 1 / 16 for m in means]


def coarse_reference(row: np.ndarray, bits: int) -> np.ndarray:
    a = np.abs(row)
    scales = shared_scales(a)[:, None]
    relative = np.where(scales > 0, a / np.where(scales > 0, scales, 1), 1.0)
    ratios = np.array(class_means(relative, bits)) if bits > 1 else np.ones(1)
    nearest = np.searchsorted((ratios[1:] + ratios[:-1]) / 2, relative)
    return bfloat16((scales * ratios[nearest]).astype(np.float32).astype(np.float64))


def reference(row: np.ndarray, bits: int) -> np.ndarray:
    if bits == 32:
        return row
    if bits == 16:
        return bfloat16(row)
    if bits in COARSE:
        levels = coarse_reference(row, bits)
    else:
        a = np.abs(row)
        low, high = bfloat16(a.min(1, keepdims=True)), bfloat16(a.max(1, keepdims=True))
        unit = (high - low) / 7
        levels = low + np.clip(np.round((a - low) / np.where(unit > 0, unit, 1)), 0, 7) * unit
    return np.where(row >= 0, levels, -levels)


@every_width
@pytest.mark.parametrize("shape", [(1, 1, 1), (2, 3, 5), (3, 1, 64), (1, 70, 13), (2, 9, 300)])
def test_matches_the_reference_row_by_row(bits: int, shape: tuple[int, int, int]) -> None:
    x = np.random.default_rng(0).normal(size=shape).astype(np.float32).astype(np.float64)
    x *= 2.0 ** (np.arange(shape[1]) % 7)[:, None]
    x[..., 1:2] = 0.0
    expected = np.stack([reference(row, bits) for row in x])
    # A bfloat16 step apart where the product of scale and ratio lies between two.
    np.testing.assert_allclose(
        round_trip(x, bits), expected, rtol=2**-7 if bits in (2, 3) else 1e-6
    )


@every_width
@given(members=st.lists(values, min_size=1, max_size=40), sets=st.integers(1, 4))
def test_contractive(bits: int, members: list[float], sets: int) -> None:
    x = np.array([[np.roll(members, shift) * 4.0**shift for shift in range(sets)]])
    error, a = np.abs(round_trip(x, bits) - x), np.abs(x)
    if bits in COARSE:
        # Everything at the mean of all explains |x|_1^2 / n of the squares, but for rounding.
        explained = a.sum() ** 2 / a.size * (1 - 0.04**2)
        assert (error**2).sum() <= (a**2).sum() * (1 + 1e-5) - (explained if bits == 1 else 0)
    else:
        bound = {4: 1 / 14, 16: 0, 32: 0}[bits] * a.max() + {4: 2**-8, 16: 2**-8, 32: 0}[bits] * a
        assert (error <= np.minimum(a, bound * (1 + 1e-5))).all()


@every_width
@pytest.mark.parametrize("members", [[0.0], [0.0, -0.0, 0.0], [2.5], [-3.0] * 9, [3.0, -3.0]])
@pytest.mark.parametrize("sets", [1, 300])
def test_equal_magnitudes_are_kept_exactly(bits: int, members: list[float], sets: int) -> None:
    x = np.array([[members] * sets])
    np.testing.assert_array_equal(round_trip(x, bits), x)


@every_width
def test_values_below_the_range_of_bfloat16_do_not_spoil_each_other(bits: int) -> None:
    x = np.array([[[1.3e-40, -1.3e-40, 1e-40, 1.3e-40]]])
    decoded = round_trip(x, bits)
    assert (np.abs(decoded - x) <= np.abs(x)).all()


@pytest.mark.parametrize("bits", COARSE)
def test_sets_that_are_tiny_beside_others_send_nothing_rather_than_too_much(bits: int) -> None:
    x = np.full((1, 2, 300), 1e-9)
    x[0, 0] = 1.0
    decoded = round_trip(x, bits)
    assert (decoded[0, 1] == 0).all()
    assert (decoded[0, 0] == 1).all()


@every_width
@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_no_crash_where_values_are_not_finite(bits: int, value: float) -> None:
    """Such rounds are discarded, but they get as far as here."""
    code = ValueCode(bits)
    octets, _ = code.encode(torch.tensor([[[1.0, value, -2.0]]]))
    assert code.decode(octets, 1, 3).shape == (1, 1, 3)


@every_width
def test_nothing_takes_nothing(bits: int) -> None:
    octets, sent = ValueCode(bits).encode(torch.empty(2, 3, 0))
    assert octets.shape == (2, 0)
    assert ValueCode(bits).decode(octets, 3, 0).shape == sent.shape == (2, 3, 0)
