"""Speed of the compressors on 8 Mi floats and one thread, against ``copy_`` of the same vector.

Like copy_, decompress writes to memory that is there. The last table compares with the bars that
compressors must reach. Times are of this thread, without the time in which another process had the
core; those with error feedback include a copy of the vector.
"""

import time
from collections.abc import Callable
from functools import partial

import torch

from benchmarks.lab.clock import processor
from benchmarks.micro.timing import medians, print_head, times_in_turns
from comm_hooks import (
    SRHT,
    Cocktail,
    Compressor,
    CountSketch,
    DCTTopK,
    ErrorFeedback,
    Identity,
    PermK,
    Quantize,
    RandomK,
    Sign,
    TopK,
)
from comm_hooks.memory.rows import Rows
from comm_hooks.randomness import Draw

SPEED_NUMEL = 8 << 20
ROUNDS = 11


class Rounds:
    """The work of an :class:`~comm_hooks.Exchange` on one vector.

    Add the residual, compress, keep the difference, decompress.
    """

    def __init__(self, compressor: Compressor, vector: torch.Tensor) -> None:
        self._compressor = compressor
        self._vector = vector
        self._memory = ErrorFeedback()
        self._rows = Rows(("vector",), vector[None].clone())
        self._active = torch.ones(1, 1, dtype=torch.bool)
        self._out = torch.empty_like(self._rows.matrix)
        self()

    def __call__(self) -> None:
        matrix = self._rows.matrix.copy_(self._vector)
        residual = self._memory.compensate(self._rows, self._active, 1.0)
        payload = self._compressor.extract(matrix, Draw((1,)), residual)
        self._memory.retain(self._rows, self._active, 1.0, key=0)
        octets = payload.view(torch.uint8)
        self._compressor.decode(self._out, octets, Draw((1,)))


def main() -> bool:
    """Print the tables; return whether a compressor misses its bar."""
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
    took = medians(times_in_turns(actions, ROUNDS, time.thread_time))
    copy = took["copy_"]

    print(
        f"\nSpeed, {SPEED_NUMEL:,} floats, one thread, median of {ROUNDS} rounds on {processor()}."
    )
    print(f"copy_ takes {copy:.2f} ms, torch.topk(64) of blocks of 4096 {took['topk']:.1f} ms.\n")
    print_head(
        *("compressor", "bytes, % of float32", "compress, ms", "decompress, ms", "both / copy_"),
        "with error feedback, ms",
    )
    for c, payload in payloads.items():
        there, back = took[f"{c} there"], took[f"{c} back"]
        in_exchange = f"{took[f'{c} with error feedback']:.1f}" if c.contractive else ""
        print(
            f"| {c} | {100 * payload.nbytes / vector.nbytes:.2f} | {there:.1f} | {back:.1f} "
            f"| {(there + back) / copy:.1f} | {in_exchange} |"
        )

    print()
    print_head("compress and decompress", "against", "measured", "bar", "")
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
    return any(measured > bar for _, _, measured, bar in bars)
