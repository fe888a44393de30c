"""Speed of the GPU kernels against a copy on the same GPU, as a Markdown table.

    python -m benchmarks.gpu_kernels

64 Mi floats, more than caches hold.  The bytes of a kernel are those that it must read and those
that it must write, each once; its bandwidth is their number over its time, and is compared with
that of ``copy_``, the roof for what computes as little as these do.  Each must reach 60 % of it.
"Queued in" is how long the CPU takes for a call, which it does while the GPU is at something else.

Exits with 1 if a kernel does not, and with 77 and one line where there is no GPU.
"""

import os
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import date
from typing import Any

import torch

NUMEL = 64 << 20
BAR = 0.6
RANKS = 8
_CALLS = 10
NO_GPU = 77


@dataclass(frozen=True)
class Case:
    """A call to be measured, and the bytes that it must read and write.

    ``no_bar`` says why it cannot reach the bar, and need not.
    """

    name: str
    call: Callable[[], object]
    nbytes: float
    no_bar: str = ""


def cases(numel: int, device: str) -> list[Case]:
    """Return what is measured: ``numel`` elements, a multiple of 4096."""
    from comm_hooks.kernels.residual import Residual
    from comm_hooks.kernels.triton import (
        count_sketch,
        gaussian,
        hadamard,
        random_signs,
        scatter,
        signs,
        top_k,
    )

    size, kept = 4096, 64
    rows, out, rest = (torch.randn(1, numel, device=device) for _ in range(3))
    residual = Residual(torch.randn(1, numel, device=device), torch.ones(1, 1, device=device))
    width = numel // 50
    sketches = torch.randn(1, width, device=device)
    blocks = rows.view(-1, size)
    scales, octets = signs.encode_signs(rows, size)
    all_scales, all_octets = (torch.stack([section] * RANKS) for section in (scales, octets))
    places, values = top_k.block_top_k(rows, size, kept)
    places += torch.arange(0, numel, size, device=device)[:, None]
    all_places, all_values = (torch.stack([section] * RANKS) for section in (places, values))

    vector, entries, packed = (
        4 * numel,
        places.nbytes + values.nbytes,
        scales.nbytes + octets.nbytes,
    )
    mean: dict[str, Any] = {"alpha": 1 / RANKS, "add": False}
    write: dict[str, Any] = {"alpha": 1.0, "add": False}
    calls: dict[str, tuple[Callable[[], object], float]] = {
        "top-k 64 of 4096, with residual": (
            lambda: top_k.block_top_k(rest, size, kept, residual),
            3 * vector + entries,
        ),
        "top-k 64 of 4096": (lambda: top_k.block_top_k(rows, size, kept), vector + entries),
        f"mean of {RANKS} top-k payloads": (
            lambda: scatter.scatter_sum(
                out, all_places, all_values, size, alpha=1 / RANKS, add=False
            ),
            vector + RANKS * entries,
        ),
        "signs": (lambda: signs.encode_signs(rows, size), vector + packed),
        "signs, subtracted": (
            lambda: signs.encode_signs(rest, size, subtract=True),
            2 * vector + packed,
        ),
        "signs of a sum with a residual, subtracted": (
            lambda: signs.encode_signs(rest, size, residual=residual, subtract=True),
            3 * vector + packed,
        ),
        "vector of signs": (
            lambda: signs.decode_signs(out, scales[None], octets[None], size, **write),
            vector + packed,
        ),
        f"mean of {RANKS} sign payloads": (
            lambda: signs.decode_signs(out, all_scales, all_octets, size, **mean),
            vector + RANKS * packed,
        ),
        "Count-Sketch, 2 %": (
            lambda: count_sketch.sketch(rows, width, [1]),
            vector + sketches.nbytes,
        ),
        "vector of a Count-Sketch, 2 %": (
            lambda: count_sketch.unsketch(out, sketches, [1], **write),
            vector + sketches.nbytes,
        ),
        "random signs": (lambda: random_signs.multiply_signs_(rest, [1]), 2 * vector),
        "Gaussian noise": (
            lambda: gaussian.add_gaussian_(rest, 1.0, key=1 << 127, counter=1 << 128),
            2 * vector,
        ),
        "Hadamard in blocks of 4096": (lambda: hadamard.hadamard(blocks), 2 * vector),
    }
    no_bar = {
        "Gaussian noise": "logarithms in float64",
        "top-k 64 of 4096": "the search for a third of the bytes",
    }
    length = 1 << 19
    if numel % length == 0:
        long_rows = rows.view(-1, length)
        name = f"Hadamard of {length} in two passes"
        calls[name] = (lambda: hadamard.hadamard(long_rows), 2 * vector)
        no_bar[name] = "2 passes"
    return [Case(name, *call, no_bar.get(name, "")) for name, call in calls.items()]


def measure() -> bool:
    """Print the table; return whether all kernels reach the bar."""
    import triton

    source = torch.randn(NUMEL, device="cuda")
    target = torch.empty_like(source)
    copy = 2 * source.nbytes / time_of(lambda: target.copy_(source))[0] / 1e6
    print(
        f"{date.today()}, {torch.cuda.get_device_name()}, PyTorch {torch.__version__}, Triton "
        f"{triton.__version__}, {NUMEL:,} floats; copy_ moves {copy:.0f} GB/s.\n"
    )
    print("| kernel | bytes per element | ms | GB/s | of copy_ | bar | queued in, ms |")
    print("|---|---|---|---|---|---|---|")
    missed = []
    for case in cases(NUMEL, "cuda"):
        milliseconds, host_milliseconds = time_of(case.call)
        bandwidth = case.nbytes / milliseconds / 1e6
        share = bandwidth / copy
        bar = f"none, {case.no_bar}" if case.no_bar else f"{BAR:.0%}"
        if not case.no_bar and share < BAR:
            missed.append(case.name)
        print(
            f"| {case.name} | {case.nbytes / NUMEL:.2f} | {milliseconds:.3f} | {bandwidth:.0f} "
            f"| {share:.0%} | {bar} | {host_milliseconds:.2f} |"
        )
    if missed:
        print(f"\nBelow the bar: {', '.join(missed)}")
    return not missed


def time_of(call: Callable[[], object]) -> tuple[float, float]:
    """Return how long a GPU takes for a call, and how long the CPU does to queue it: milliseconds.

    The GPU sleeps until the calls are queued, so that it does not wait for the CPU in between.
    """
    call()
    torch.cuda.synchronize()
    on_gpu, on_cpu = [], []
    for _ in range(5):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda._sleep(100_000_000)
        begin.record()
        started = time.perf_counter()
        for _ in range(_CALLS):
            call()
        on_cpu.append(1000 * (time.perf_counter() - started) / _CALLS)
        end.record()
        end.synchronize()
        on_gpu.append(begin.elapsed_time(end) / _CALLS)
    return statistics.median(on_gpu), statistics.median(on_cpu)


def obstacle() -> str | None:
    """Return why nothing can be measured here, or None."""
    if not torch.cuda.is_available():
        return "needs a GPU, and PyTorch finds none"
    if os.environ.get("TRITON_INTERPRET", "0") != "0":
        return "measures nothing in Triton's interpreter: unset TRITON_INTERPRET"
    return None


def main() -> None:
    reason = obstacle()
    if reason:
        print(f"gpu_kernels.py {reason}")
        sys.exit(NO_GPU)
    sys.exit(not measure())


if __name__ == "__main__":
    main()
