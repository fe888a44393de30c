"""Relative mean squared error of decompress(compress(v)), d = 1024, b = 128, against theory.

Theory as in Song et al. for sketches R with E[R^T R] = I.
"""

import math

import torch

from benchmarks.micro.timing import print_head
from comm_hooks import SRHT, Compressor, CountSketch, GaussianSketch, RandomK

D, B, DRAWS = 1024, 128, 2000


def decoded(compressor: Compressor, vector: torch.Tensor) -> torch.Tensor:
    """Return decompress(compress(vector)) for keys 0 ... DRAWS - 1, (DRAWS, d)."""
    rows = []
    for key in range(DRAWS):
        payload = compressor.compress(vector, key=key)
        rows.append(compressor.decompress(payload, vector.numel(), key=key))
    return torch.stack(rows)


def main() -> None:
    """Print the table."""
    ramp = torch.arange(D, dtype=torch.float32)
    vectors = {
        "gaussian": torch.randn(D, generator=torch.Generator().manual_seed(0)),
        "constant": torch.ones(D),
        "smooth": torch.sin(ramp * (2 * math.pi / D)) + 0.5,
    }
    print(f"\nRelative mean squared error, d = {D}, b = {B}, {DRAWS} draws; in the last column the")
    print("variance of <decompress(compress(v)), v> over (|v|^4 + |v|^4) / b.\n")
    print_head(
        *("operator", "vector", "theory", "measured", "error of the mean x draws", "inner product")
    )
    cases: list[tuple[Compressor, float]] = [
        (GaussianSketch(ratio=B / D), (D + 1) / B),
        (CountSketch(ratio=B / D), D / B - 1),
        (SRHT(ratio=B / D), D / B - 1),
        (RandomK(density=B / D), D / B - 1),
    ]
    for compressor, theory in cases:
        for name, vector in vectors.items():
            draws = decoded(compressor, vector)
            power = vector.square().sum()
            error = (draws - vector).square().sum(1).mean() / power
            bias = (draws.mean(0) - vector).square().sum() / power
            products = (draws @ vector).var() / (2 * power.square() / B)
            print(
                f"| {type(compressor).__name__} | {name} | {theory:.3f} | {error:.3f} "
                f"| {bias * DRAWS:.2f} | {products:.2f} |"
            )
    lossless = SRHT(ratio=1.0)
    vector = vectors["gaussian"]
    back = lossless.decompress(lossless.compress(vector, key=1), D, key=1)
    print(f"\nSRHT with b = d: largest error {(back - vector).abs().max():.1e}")
