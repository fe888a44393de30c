"""Operator quality of the sketches: error, bias and inner products as theory says."""

import functools
import math
from collections.abc import Callable

import pytest
import torch

from comm_hooks import SRHT, CountSketch, GaussianSketch
from comm_hooks.compressors.base import Compressor
from comm_hooks.randomness import Draw

D, B, DRAWS = 1024, 128, 2000
SKETCHES = [
    (CountSketch(ratio=B / D), D / B - 1),
    (SRHT(ratio=B / D), D / B - 1),
    (GaussianSketch(ratio=B / D), (D + 1) / B),
]
every_sketch = pytest.mark.parametrize(
    ("sketch", "theory"), SKETCHES, ids=[type(s).__name__ for s, _ in SKETCHES]
)

ramp = torch.arange(D, dtype=torch.float32)
VECTORS = {
    "gaussian": torch.randn(D, generator=torch.Generator().manual_seed(0)),
    "constant": torch.ones(D),
    "smooth": torch.sin(ramp * (2 * math.pi / D)) + 0.5,
    "alternating": (-1.0) ** ramp,
    "period of the sketch's width": torch.sin(ramp * (2 * math.pi / B)),
    "one column of a matrix": (ramp % B == 5).float(),
    "a run of elements": ((ramp >= 700) & (ramp < 708)).float(),
    "one element": (ramp == 700).float(),
}
Decoded = Callable[[Compressor, str], torch.Tensor]


@pytest.fixture(scope="module")
def decoded() -> Decoded:
    """A function to decompress(compress(vector)) for keys 0 ... DRAWS - 1, (DRAWS, d)."""

    @functools.cache
    def decoded(sketch: Compressor, name: str) -> torch.Tensor:
        draw = Draw(range(DRAWS))
        payloads = sketch.encode(VECTORS[name].repeat(DRAWS, 1), draw)
        out = torch.empty(DRAWS, D)
        sketch.decode(out, payloads.view(torch.uint8), draw)
        return out

    return decoded


@pytest.mark.parametrize(
    ("sketch", "theory", "name"),
    [
        pytest.param(
            *each,
            name,
            id=f"{name}-{type(each[0]).__name__}",
            marks=[pytest.mark.slow] * isinstance(each[0], GaussianSketch),
        )
        for name in VECTORS
        for each in SKETCHES
        # Rotations leave a Gaussian matrix what it is, and it takes ten times as long.
        if not isinstance(each[0], GaussianSketch) or name == "gaussian"
    ],
)
def test_relative_mean_squared_error(
    sketch: Compressor, theory: float, name: str, decoded: Decoded
) -> None:
    vector = VECTORS[name]
    errors = (decoded(sketch, name) - vector).square().sum(1) / vector.square().sum()
    # 5 % above theory, and 3 standard errors for vectors whose error varies from draw to draw.
    assert errors.mean() <= 1.05 * theory + 3 * errors.std() / math.sqrt(DRAWS)
    assert errors.mean() >= 0.9 * theory - 3 * errors.std() / math.sqrt(DRAWS)


@every_sketch
def test_the_mean_over_draws_approaches_the_vector_as_one_over_draws(
    sketch: Compressor, theory: float, decoded: Decoded
) -> None:
    # Rotations leave a Gaussian matrix what it is: its draws of another test will do.
    name = "gaussian" if isinstance(sketch, GaussianSketch) else "smooth"
    vector, draws = VECTORS[name], decoded(sketch, name)
    for count in (100, 400, 1600):
        error = (draws[:count].mean(0) - vector).square().sum() / vector.square().sum()
        assert 0.5 * theory / count <= error <= 1.5 * theory / count


@pytest.mark.slow
@every_sketch
@pytest.mark.parametrize(
    ("left", "right"),
    [
        ("gaussian", "gaussian"),
        ("gaussian", "constant"),
        ("constant", "constant"),
        ("smooth", "smooth"),
        ("smooth", "constant"),
        ("constant", "alternating"),
        ("period of the sketch's width", "period of the sketch's width"),
        ("one column of a matrix", "one column of a matrix"),
        ("a run of elements", "a run of elements"),
    ],
)
def test_inner_products_spread_as_theory_says(
    sketch: Compressor, theory: float, left: str, right: str, decoded: Decoded
) -> None:
    """A sign table that repeats with the rows passes the error test and fails here."""
    v, h = VECTORS[left], VECTORS[right]
    products = decoded(sketch, left) @ h
    exact = v @ h
    scale = v.norm() * h.norm()
    # Independent signs: (|v|^2 |h|^2 + <v, h>^2 - 2 sum v^2 h^2) / b, without the last term for
    # Gaussians; sampling without collisions or replacement may do better still.  15 % are three
    # standard errors of a variance over 2000 draws, with some room for heavy tails.
    variance = (scale**2 + exact**2) / B
    assert abs(products.mean() - exact) <= 5 * products.std() / math.sqrt(DRAWS) + 1e-4 * scale
    assert products.var() <= 1.15 * variance


@pytest.mark.parametrize("numel", [1, 2, 3, 64, 100, 1024, 1025, 4095, 5000])
def test_srht_of_full_width_is_lossless(numel: int) -> None:
    vector = torch.randn(numel, generator=torch.Generator().manual_seed(1))
    sketch = SRHT(ratio=1.0)
    back = sketch.decompress(sketch.compress(vector, key=9), numel, key=9)
    torch.testing.assert_close(back, vector, atol=1e-5, rtol=1e-5)


def test_long_rows_draw_signs_for_every_window() -> None:
    """Rows longer than the sign window: a constant vector still has the variance of theory."""
    numel, sketch = 1 << 18, CountSketch(ratio=1 / 4)
    ones = torch.ones(numel)
    squares = torch.stack([sketch.compress(ones, key=key).square().sum() for key in range(300)])
    products = squares / numel
    assert abs(products.mean() - 1) < 5 * products.std() / math.sqrt(300)
    assert products.var() < 1.25 * 2 / sketch.width(numel)


def test_draws_differ_between_steps_and_parameters() -> None:
    sketch, vector = CountSketch(ratio=0.1), VECTORS["gaussian"]
    payloads = {tuple(sketch.compress(vector, key=key).tolist()) for key in range(20)}
    assert len(payloads) == 20
