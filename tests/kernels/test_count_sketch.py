"""Count-Sketch: pieces, batches of lines and the definition agree, in both directions."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from comm_hooks.kernels import count_sketch
from comm_hooks.kernels.count_sketch import draw, sketch, unsketch
from comm_hooks.kernels.random_signs import SIGN_WINDOW
from tests.kernels.vectors import matrices

ways = pytest.mark.parametrize(
    ("narrow", "batch"),
    [(0, 1), (1 << 30, 1), (1 << 30, 100), (1 << 30, 1 << 16)],
    ids=["line by line", "line after line in torch", "small batches", "large batches"],
)
LONG = [
    (3 * SIGN_WINDOW, SIGN_WINDOW),
    (5 * SIGN_WINDOW + 17, 2 * SIGN_WINDOW + 5),
    (2 * SIGN_WINDOW, 2 * SIGN_WINDOW),
]


def compare(
    rows: torch.Tensor, width: int, key: int, narrow: int, batch: int, alpha: float, add: bool
) -> None:
    keys = range(key, key + len(rows))
    out, expected = (torch.linspace(-1, 1, rows.numel()).view(rows.shape) for _ in range(2))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(count_sketch, "_NARROW", narrow)
        patch.setattr(count_sketch, "_BATCH", batch)
        sums = sketch(rows, width, keys)
        unsketch(out, sums, keys, alpha=alpha, add=add)
    # Sums of another order.
    torch.testing.assert_close(sums, sketch.reference(rows, width, keys), rtol=1e-4, atol=1e-4)
    unsketch.reference(expected, sums, keys, alpha=alpha, add=add)
    torch.testing.assert_close(out, expected, rtol=1e-6, atol=1e-6)


@ways
@given(data=st.data(), alpha=st.sampled_from([1.0, -0.5]), add=st.booleans())
def test_equals_the_reference(
    narrow: int, batch: int, data: st.DataObject, alpha: float, add: bool
) -> None:
    rows = data.draw(matrices(st.integers(1, 3), st.integers(1, 700)))
    width = data.draw(st.integers(1, rows.shape[1]))
    key = data.draw(st.integers(0, 2**64 - 4))
    compare(rows, width, key, narrow, batch, alpha, add)


@ways
@pytest.mark.parametrize(("numel", "width"), LONG)
def test_lines_of_several_windows(narrow: int, batch: int, numel: int, width: int) -> None:
    rows = torch.randn(2, numel, generator=torch.Generator().manual_seed(0))
    for add in (False, True):
        compare(rows, width, 3, narrow, batch, 0.5, add)


def test_not_finite_elements_reach_their_own_sums_only() -> None:
    rows = torch.ones(1, 4000)
    rows[0, 1234] = float("nan")
    rows[0, 77] = float("inf")
    assert (~sketch(rows, 600, [5]).isfinite()).sum() == 2


def test_every_line_draws_its_own_rotation_and_windows() -> None:
    rotations, offsets = draw([1, 2], 7 * SIGN_WINDOW, 2 * SIGN_WINDOW)
    assert rotations.shape == (2, 4)
    assert offsets.shape == (2, 8)
    assert len(set(offsets.flatten().tolist())) == 16
    assert (rotations < 2 * SIGN_WINDOW).all()
