"""GPU kernel: the orthonormal Walsh-Hadamard transform of rows, by matrix products.

A transform of 2^(a+b) elements is H_a X H_b of the elements as a matrix X of 2^a lines, and H is
the same matrix for all of them.  GPUs multiply matrices by far faster than they add (HadaCore;
Agarwal et al., 2024).  A program holds 64 lines of 64 elements, so transforms of up to 4096 are one
pass over the data, as many of them in a program as fit.  A longer one takes one more pass for every
7 bits of its length: products from the left, with lines that are far apart, of 32 consecutive
elements, which are whole transactions of memory.

The factors of H are 1 and -1, and each float32 is a sum of three bfloat16 numbers.  So products are
exact, and their sums are float32.

One pass reaches 60 % of the bandwidth of a copy; a second pass halves that share.

An element that is not finite spreads over all elements of its program: 4096, or one transform.
"""

import math
import os

import torch
import triton
import triton.language as tl
from torch import Tensor

from comm_hooks.kernels.triton.launching import launch

_BITS = 6  # of the lines of a program, and of the elements of a line
_FAR_BITS = 7  # at most, and at least 4: products need 16 lines
_COLUMNS = 32
# The interpreter would multiply the integers that it keeps bfloat16 in.
_IS_INTERPRETED = os.environ.get("TRITON_INTERPRET", "0") != "0"
_FACTOR = tl.float32 if _IS_INTERPRETED else tl.bfloat16


@triton.jit
def _matrix(SIZE: tl.constexpr, BITS: tl.constexpr, FACTOR: tl.constexpr):
    """Return a matrix of SIZE lines with Hadamard matrices of 2^BITS lines on its diagonal."""
    line, column = tl.arange(0, SIZE)[:, None], tl.arange(0, SIZE)[None, :]
    parity = line & column & ((1 << BITS) - 1)
    parity ^= parity >> 4
    parity ^= parity >> 2
    parity ^= parity >> 1
    signs = 1.0 - 2.0 * (parity & 1).to(tl.float32)
    return tl.where(line >> BITS == column >> BITS, signs, 0.0).to(FACTOR)


@triton.jit
def _high_bits(values):
    return (values.to(tl.int32, bitcast=True) & -65536).to(tl.float32, bitcast=True)


@triton.jit
def _parts(values, FACTOR: tl.constexpr):
    """Split float32 values into three addends with mantissas of 8 bits, exact in bfloat16."""
    high = _high_bits(values)
    rest = values - high
    middle = _high_bits(rest)
    return high.to(FACTOR), middle.to(FACTOR), (rest - middle).to(FACTOR)


@triton.jit
def _transform(
    source,
    target,
    numel,
    scale,
    tiles_per_group,
    STRIDE: tl.constexpr,
    LINES: tl.constexpr,
    COLUMNS: tl.constexpr,
    LINE_BITS: tl.constexpr,
    COLUMN_BITS: tl.constexpr,
    FACTOR: tl.constexpr,
):
    """Transform one tile: LINES lines, STRIDE apart, of COLUMNS consecutive elements."""
    program = tl.program_id(0)
    group = (program // tiles_per_group).to(tl.int64)
    base = group * (LINES * STRIDE) + (program % tiles_per_group) * COLUMNS
    offsets = tl.arange(0, LINES)[:, None] * STRIDE + tl.arange(0, COLUMNS)[None, :]
    inside = offsets < numel - base
    values = tl.load(source + base + offsets, mask=inside, other=0.0)
    if COLUMN_BITS:
        matrix = _matrix(COLUMNS, COLUMN_BITS, FACTOR)
        high, middle, low = _parts(values, FACTOR)
        values = tl.dot(low, matrix)
        values = tl.dot(middle, matrix, values)
        values = tl.dot(high, matrix, values)
    if LINE_BITS:
        matrix = _matrix(LINES, LINE_BITS, FACTOR)
        high, middle, low = _parts(values, FACTOR)
        values = tl.dot(matrix, low)
        values = tl.dot(matrix, middle, values)
        values = tl.dot(matrix, high, values)
    tl.store(target + base + offsets, values * scale, mask=inside)


def hadamard(rows: Tensor) -> Tensor:
    """Like :func:`comm_hooks.kernels.hadamard.hadamard`, with additions in another order."""
    length = rows.shape[1]
    bits = length.bit_length() - 1
    source = rows.contiguous()
    target = torch.empty_like(rows, memory_format=torch.contiguous_format)
    numel = rows.numel()
    far = max(0, bits - 2 * _BITS)
    if far:
        far = max(far, 4)
    near = bits - far
    lines = 1 << _BITS
    launch(
        _transform,
        triton.cdiv(numel, lines * lines),
        source,
        target,
        numel,
        1 / math.sqrt(length),
        1,
        STRIDE=lines,
        LINES=lines,
        COLUMNS=lines,
        LINE_BITS=max(0, near - _BITS),
        COLUMN_BITS=min(near, _BITS),
        FACTOR=_FACTOR,
    )
    passes = triton.cdiv(far, _FAR_BITS)
    for done in range(passes):
        # As even as it goes.
        step = (far + done) // passes
        stride, columns = 1 << near, _COLUMNS
        launch(
            _transform,
            numel // (columns << step),
            target,
            target,
            numel,
            1.0,
            stride // columns,
            STRIDE=stride,
            LINES=1 << step,
            COLUMNS=columns,
            LINE_BITS=step,
            COLUMN_BITS=0,
            FACTOR=_FACTOR,
        )
        near += step
    return target
