"""Compiles the kernels for GPUs that are not there, with the arguments that they are launched with.

The interpreter runs code that the compiler refuses.  Imported where the interpreter is off.
"""

from typing import Any
from unittest import mock

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.runtime import JITFunction

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

_TYPES = {
    torch.float32: "*fp32",
    torch.bfloat16: "*bf16",
    torch.int32: "*i32",
    torch.int64: "*i64",
    torch.uint8: "*u8",
}


def compile_all(architecture: int) -> list[str]:
    """Compile every kernel for an NVIDIA architecture (90: Hopper); return their names."""
    compiled: list[str] = []

    def compile_instead_of_launching(
        kernel: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any
    ) -> None:
        given = dict(zip(kernel.arg_names, args, strict=False))
        constants = {name: kwargs.pop(name) for name in kernel.arg_names if name in kwargs}
        # Triton makes a constant of a 1, and tells the compiler what is a multiple of 16.
        constants.update((n, 1) for n, value in given.items() if type(value) is int and value == 1)
        signature = {
            name: "constexpr" if name in constants else _type(given[name])
            for name in kernel.arg_names
        }
        attributes = {
            (index,): [["tt.divisibility", 16]]
            for index, name in enumerate(kernel.arg_names)
            if name not in constants and _is_multiple_of_16(given[name])
        }
        triton.compile(
            ASTSource(kernel, signature, constants, attributes),
            target=GPUTarget("cuda", architecture, 32),
            options=kwargs,
        )
        compiled.append(kernel.__name__)

    with mock.patch.object(JITFunction, "run", compile_instead_of_launching):
        _launch_all(torch.zeros(2, 8192), width=512, size=4096, kept=64)
        _launch_all(torch.zeros(1, 1), width=1, size=8, kept=1)
        count_sketch.sketch(torch.zeros(2, 80000), 40000, range(2))
    return compiled


def _type(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        return _TYPES[value.dtype]
    return "fp32" if isinstance(value, float) else "i32"


def _is_multiple_of_16(value: Any) -> bool:
    return isinstance(value, torch.Tensor) or (isinstance(value, int) and value % 16 == 0)


def _launch_all(rows: torch.Tensor, *, width: int, size: int, kept: int) -> None:
    n = len(rows)
    hadamard.hadamard(rows)
    gaussian.add_gaussian_(rows, 1.0, key=1, counter=1 << 128)
    keys = range(n)
    count_sketch.sketch(rows, width, keys)
    count_sketch.unsketch(rows, torch.zeros(n, width), keys, alpha=0.5, add=True)
    random_signs.multiply_signs_(rows, keys)
    residual = Residual(rows.bfloat16(), torch.ones(n, 1))
    scales, octets = signs.encode_signs(rows, size, residual=residual, subtract=True)
    signs.decode_signs(rows, scales[None], octets[None], size, alpha=0.5, add=True)
    places, values = top_k.block_top_k(rows, size, kept, residual)
    scatter.scatter_sum(rows, places[None], values[None], size, alpha=0.5, add=False)
