"""Quality and speed of the compressors, as two Markdown tables.

    python benchmarks/operators.py            # both tables, about two minutes on one core
    python benchmarks/operators.py quality
    python benchmarks/operators.py speed

Quality: d = 1024, b = 128, fresh keys; theory as in Song et al. for sketches R with E[R^T R] = I.
Speed: 8 Mi floats on one thread, against ``copy_`` of the same vector in the same run; like copy_,
decompress writes to memory that is there.
"""

import argparse
import math
import platform

import torch
from torch.utils.benchmark import Timer

from comm_hooks import (
    SRHT,
    Compressor,
    CountSketch,
    GaussianSketch,
    PermK,
    Quantize,
    RandomK,
    Sign,
    TopK,
)

D, B, DRAWS = 1024, 128, 2000
SPEED_NUMEL = 8 << 20


def decoded(compressor: Compressor, vector: torch.Tensor) -> torch.Tensor:
    """Return decompress(compress(vector)) for keys 0 ... DRAWS - 1, (DRAWS, d)."""
    rows = []
    for key in range(DRAWS):
        payload = compressor.compress(vector, key=key)
        rows.append(compressor.decompress(payload, vector.numel(), key=key))
    return torch.stack(rows)


def quality() -> None:
    ramp = torch.arange(D, dtype=torch.float32)
    vectors = {
        "gaussian": torch.randn(D, generator=torch.Generator().manual_seed(0)),
        "constant": torch.ones(D),
        "smooth": torch.sin(ramp * (2 * math.pi / D)) + 0.5,
    }
    print(f"\nRelative mean squared error, d = {D}, b = {B}, {DRAWS} draws; in the last column the")
    print("variance of <decompress(compress(v)), v> over (|v|^4 + |v|^4) / b.\n")
    print("| operator | vector | theory | measured | error of the mean x draws | inner product |")
    print("|---|---|---|---|---|---|")
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


def milliseconds(statement: str, **names: object) -> float:
    timer = Timer(statement, globals=names, num_threads=1)
    return timer.blocked_autorange(min_run_time=0.5).median * 1e3


def speed() -> None:
    torch.set_num_threads(1)
    vector = torch.randn(SPEED_NUMEL)
    target = torch.empty_like(vector)
    copy = milliseconds("target.copy_(vector)", target=target, vector=vector)
    print(f"\nSpeed, {SPEED_NUMEL:,} floats, one thread; copy_ takes {copy:.2f} ms ({cpu()}).\n")
    print("| compressor | bytes, % of float32 | compress, ms | decompress, ms | both / copy_ |")
    print("|---|---|---|---|---|")
    compressors: list[Compressor] = [
        CountSketch(ratio=0.02),
        CountSketch(ratio=0.05),
        SRHT(ratio=0.02),
        RandomK(density=1 / 64),
        PermK(),
        TopK(density=1 / 64, value_bits=1),
        Sign(),
        Quantize(bits=4),
    ]
    for compressor in compressors:
        payload = compressor.compress(vector, key=1)
        names = {"c": compressor, "v": vector, "p": payload, "o": target, "n": SPEED_NUMEL}
        there = milliseconds("c.compress(v, key=1)", **names)
        back = milliseconds("c.decompress(p, n, key=1, out=o)", **names)
        share = 100 * payload.nbytes / vector.nbytes
        print(
            f"| {compressor} | {share:.2f} | {there:.1f} | {back:.1f} "
            f"| {(there + back) / copy:.1f} |"
        )


def cpu() -> str:
    try:
        with open("/proc/cpuinfo") as lines:
            names = [line.split(":")[1].strip() for line in lines if line.startswith("model name")]
        return names[0]
    except (OSError, IndexError):
        return platform.machine()


def main() -> None:
    parser = argparse.ArgumentParser(description="Quality and speed of the compressors.")
    parser.add_argument("table", nargs="?", choices=["quality", "speed", "all"], default="all")
    chosen = parser.parse_args().table
    if chosen in ("quality", "all"):
        quality()
    if chosen in ("speed", "all"):
        speed()


if __name__ == "__main__":
    main()
