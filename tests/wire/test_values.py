"""Codes of kept values against a NumPy reference, and what they promise about the error."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from comm_hooks.wire.values import VALUE_BITS, ValueCode

every_width = pytest.mark.parametrize("bits", VALUE_BITS)
# Squares of anything smaller vanish in float32, and bfloat16 rounds coarsely below 1e-38.
values = st.floats(-1e6, 1e6, width=32).map(lambda x: x if abs(x) > 1e-15 else 0.0)


def round_trip(array: np.ndarray, bits: int) -> np.ndarray:
    code, tensor = ValueCode(bits), torch.from_numpy(array).float()
    _, sets, count = tensor.shape
    octets = code.encode(tensor)
    assert octets.dtype == torch.uint8
    assert octets.shape == (len(tensor), code.nbytes(sets, count))
    # What follows in a payload is none of the code's business.
    octets = torch.nn.functional.pad(octets, (0, -octets.shape[1] % 4 + 4), value=255)
    return code.decode(octets, sets, count).double().numpy()


def bfloat16(x: np.ndarray) -> np.ndarray:
    """Round to 8 significant bits, ties to even."""
    mantissa, exponent = np.frexp(x)
    return np.ldexp(np.round(mantissa * 256) / 256, exponent)


def reference(x: np.ndarray, bits: int) -> np.ndarray:
    if bits == 32:
        return x
    if bits == 16:
        return bfloat16(x)
    a = np.abs(x)
    mean = a.mean()
    if bits == 1:
        levels = np.full_like(a, bfloat16(mean))
    elif bits == 2:
        low, high = a[a <= mean], a[a > mean]
        levels = np.where(
            a > mean,
            bfloat16(high.mean() if high.size else mean),
            bfloat16(low.mean() if low.size else mean),
        )
    else:
        low, high = bfloat16(a.min()), bfloat16(a.max())
        unit = (high - low) / 7
        levels = low + np.clip(np.round((a - low) / (unit or 1)), 0, 7) * unit
    return np.where(x >= 0, levels, -levels)


@every_width
@pytest.mark.parametrize("shape", [(1, 1, 1), (2, 3, 5), (3, 1, 64), (1, 70, 13)])
def test_matches_the_reference_set_by_set(bits: int, shape: tuple[int, int, int]) -> None:
    x = np.random.default_rng(0).normal(size=shape).astype(np.float32).astype(np.float64)
    x *= 2.0 ** (np.arange(shape[1]) % 7)[:, None]
    x[..., 1:2] = 0.0
    expected = np.stack([[reference(s, bits) for s in row] for row in x])
    np.testing.assert_allclose(round_trip(x, bits), expected, rtol=1e-6)


@every_width
@given(members=st.lists(values, min_size=1, max_size=40))
def test_contractive(bits: int, members: list[float]) -> None:
    x = np.array([[members]])
    error, a = np.abs(round_trip(x, bits) - x), np.abs(x)
    if bits in (1, 2):
        # One mean of n magnitudes explains |x|_1^2 / n of their squares, two of them no less.
        explained = a.sum() ** 2 / a.size * (1 - 2**-15)
        assert (error**2).sum() <= (a**2).sum() * (1 + 1e-5) - explained
    else:
        bound = {4: 1 / 14, 16: 0, 32: 0}[bits] * a.max() + {4: 2**-8, 16: 2**-8, 32: 0}[bits] * a
        assert (error <= np.minimum(a, bound * (1 + 1e-5))).all()


@every_width
@pytest.mark.parametrize("members", [[0.0], [0.0, -0.0, 0.0], [2.5], [-3.0] * 9, [3.0, -3.0]])
def test_equal_magnitudes_are_kept_exactly(bits: int, members: list[float]) -> None:
    x = np.array([[members]])
    np.testing.assert_allclose(round_trip(x, bits), x, rtol=1e-6)


def test_a_level_that_no_value_has_is_the_mean() -> None:
    octets = ValueCode(bits=2).encode(torch.tensor([[[2.5, -2.5, 2.5]]]))
    assert octets[0, :4].view(torch.bfloat16).tolist() == [2.5, 2.5]


@every_width
def test_values_below_the_range_of_bfloat16_do_not_spoil_each_other(bits: int) -> None:
    x = np.array([[[1.3e-40, -1.3e-40, 1e-40, 1.3e-40]]])
    decoded = round_trip(x, bits)
    assert (np.abs(decoded - x) <= np.abs(x)).all()


@pytest.mark.parametrize(("bits", "per_value"), [(1, 1.25), (2, 2.5), (4, 4.5), (16, 16), (32, 32)])
def test_bits_of_each_of_64_values_with_their_levels(bits: int, per_value: float) -> None:
    assert 8 * ValueCode(bits).nbytes(sets=50, count=64) == 50 * 64 * per_value


@pytest.mark.parametrize(
    ("bits", "gaussian", "laplace"),
    [(1, 0.0119, 0.0358), (2, 0.0044, 0.0143), (4, 0.00044, 0.0015), (16, 3e-6, 3e-6)],
)
def test_the_errors_in_the_documentation(bits: int, gaussian: float, laplace: float) -> None:
    generator = np.random.default_rng(0)
    for draw, expected in (generator.normal, gaussian), (generator.laplace, laplace):
        x = draw(size=(500, 4096))
        places = np.argpartition(-np.abs(x), 64, axis=1)[:, :64]
        kept = np.take_along_axis(x, places, 1)[None]
        error = ((round_trip(kept, bits) - kept) ** 2).sum() / (kept**2).sum()
        assert error == pytest.approx(expected, rel=0.15 if bits == 16 else 0.05)
