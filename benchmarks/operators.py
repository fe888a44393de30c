"""Quality and speed of the compressors, as Markdown tables.

    python benchmarks/operators.py            # all tables, about two minutes on one core
    python benchmarks/operators.py quality
    python benchmarks/operators.py speed

Quality: d = 1024, b = 128, fresh keys; theory as in Song et al. for sketches R with E[R^T R] = I.
Speed: 8 Mi floats on one thread, against ``copy_`` of the same vector in the same run; like copy_,
decompress writes to memory that is there.  The last table compares with what the compressors must
reach.
"""

import argparse
import math
import statistics
import time
from collections.abc import Callable, Mapping
from functools import partial

import torch

from benchmarks.lab.machine import processor
from comm_hooks import (
    SRHT,
    Cocktail,
    Compressor,
    CountSketch,
    DCTTopK,
    ErrorFeedback,
    GaussianSketch,
    Identity,
    PermK,
    Quantize,
    RandomK,
    Sign,
    TopK,
)
from comm_hooks.memory.rows import Rows
from comm_hooks.randomness import Draw

D, B, DRAWS = 1024, 128, 2000
SPEED_NUMEL = 8 << 20
ROUNDS = 11


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


class Rounds:
    """What an :class:`~comm_hooks.Exchange` does with one vector, between loading and storing it.

    Add the residual, compress and subtract what is sent, keep the rest, decompress.
    """

    def __init__(self, compressor: Compressor, vector: torch.Tensor) -> None:
        self._compressor = compressor
        self._vector = vector
        self._memory = ErrorFeedback()
        self._rows = Rows(("vector",), vector[None].clone())
        self._active = torch.ones(1, 1, dtype=torch.bool)
        self._out = torch.empty_like(self._rows.matrix)
        self()

    def load(self) -> None:
        self._rows.matrix.copy_(self._vector)

    def __call__(self) -> None:
        matrix = self._rows.matrix
        residual = self._memory.compensate(self._rows, self._active, 1.0)
        payload = self._compressor.extract(matrix, Draw((1,)), residual)
        self._memory.retain(self._rows, self._active, 1.0, key=0)
        octets = payload.view(torch.uint8)
        self._compressor.decode(self._out, octets, Draw((1,)))


def milliseconds(actions: Mapping[str, Callable[[], object]]) -> dict[str, float]:
    """Return the median time of each action.

    Every round goes through all of them, so that whatever else the machine does slows all alike.
    It is the time of this thread: without that in which another process had the core.
    """
    times: dict[str, list[float]] = {name: [] for name in actions}
    for _ in range(ROUNDS):
        for name, action in actions.items():
            if isinstance(action, Rounds):
                action.load()
            start = time.thread_time()
            action()
            times[name].append(1e3 * (time.thread_time() - start))
    return {name: statistics.median(measured) for name, measured in times.items()}


def speed() -> None:
    torch.set_num_threads(1)
    vector = torch.randn(SPEED_NUMEL)
    target = torch.empty_like(vector)
    compressors: list[Compressor] = [
        CountSketch(ratio=0.02),
        CountSketch(ratio=0.05),
        SRHT(ratio=0.02),
        RandomK(density=1 / 64),
        PermK(),
        TopK(density=1 / 64),
        TopK(density=1 / 64, value_bits=1),
        Cocktail(),
        DCTTopK(),
        Sign(),
        Quantize(bits=4),
        Identity(bits=16),
    ]
    actions: dict[str, Callable[[], object]] = {
        "copy_": lambda: target.copy_(vector),
        "topk": lambda: vector.view(-1, 4096).topk(64),
    }
    payloads = {compressor: compressor.compress(vector, key=1) for compressor in compressors}
    for c, payload in payloads.items():
        actions[f"{c} there"] = partial(c.compress, vector, key=1)
        actions[f"{c} back"] = partial(c.decompress, payload, SPEED_NUMEL, key=1, out=target)
        if c.contractive:
            actions[f"{c} with error feedback"] = Rounds(c, vector)
    took = milliseconds(actions)
    copy = took["copy_"]

    print(
        f"\nSpeed, {SPEED_NUMEL:,} floats, one thread, median of {ROUNDS} rounds on {processor()}."
    )
    print(f"copy_ takes {copy:.2f} ms, torch.topk(64) of blocks of 4096 {took['topk']:.1f} ms.\n")
    print(
        "| compressor | bytes, % of float32 | compress, ms | decompress, ms | both / copy_ "
        "| with error feedback, ms |"
    )
    print("|---|---|---|---|---|---|")
    for c, payload in payloads.items():
        there, back = took[f"{c} there"], took[f"{c} back"]
        in_exchange = f"{took[f'{c} with error feedback']:.1f}" if c.contractive else ""
        print(
            f"| {c} | {100 * payload.nbytes / vector.nbytes:.2f} | {there:.1f} | {back:.1f} "
            f"| {(there + back) / copy:.1f} | {in_exchange} |"
        )

    print("\n| compress and decompress | against | measured | bar | |")
    print("|---|---|---|---|---|")
    bars = [
        (f"{c}", "copy_", (took[f"{c} there"] + took[f"{c} back"]) / copy, 4.0)
        for c in (CountSketch(ratio=0.02), CountSketch(ratio=0.05), Sign())
    ]
    top_k = TopK(density=1 / 64)
    both, feedback = took[f"{top_k} there"] + took[f"{top_k} back"], f"{top_k} with error feedback"
    bars.append((f"{top_k}", "torch.topk", both / took["topk"], 1.0))
    bars.append((feedback, "torch.topk", took[feedback] / took["topk"], 1.0))
    for name, against, measured, bar in bars:
        verdict = "met" if measured <= bar else "missed"
        print(f"| {name} | {against} | {measured:.2f} | {bar:.0f} | {verdict} |")


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
