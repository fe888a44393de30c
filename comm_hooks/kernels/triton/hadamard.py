"""The orthonormal Walsh-Hadamard transform of the rows of a matrix.

A program holds 4096 elements in registers.  Transforms of up to that length are one pass over the
data, as many of them in a program as fit: they are next to each other in memory, so a shorter
transform is the same program with fewer stages.  A longer one takes one more pass for every 7 bits
of its length: the stages between elements that are far apart, on tiles of 32 consecutive columns,
which are whole transactions of memory.

Why one pass should reach 60 % of a copy: it reads and writes every element once, as a copy does, in
transactions of 128 bytes, and a stage of a tile costs an element one addition and one shuffle
between threads at most, some 60 instructions for 4096 elements, where a GPU has over a hundred in
the time that 8 bytes take.  A second pass halves that share: it counts bytes once.
"""

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from comm_hooks.kernels.triton.launching import launch

_TILE = 4096
_COLUMNS = 32
_WARPS = 8


@triton.jit
def _butterflies(values, LENGTH: tl.constexpr, FIRST: tl.constexpr, LAST: tl.constexpr):
    """Add and subtract the elements of a tile that differ in bit FIRST, ..., LAST - 1."""
    for bit in tl.static_range(FIRST, LAST):
        pairs = tl.reshape(values, [LENGTH >> (bit + 1), 2, 1 << bit])
        # As integers, the sum of a pair minus one of them is exactly the other.
        bits = pairs.to(tl.int32, bitcast=True)
        partner = (tl.sum(bits, 1, keep_dims=True) - bits).to(tl.float32, bitcast=True)
        is_second = tl.arange(0, 2)[None, :, None] == 1
        pairs = tl.where(is_second, partner - pairs, partner + pairs)
        values = tl.reshape(pairs, [LENGTH])
    return values


@triton.jit
def _transform(
    source,
    target,
    numel,
    scale,
    tiles_per_group,
    STRIDE: tl.constexpr,
    COLUMNS: tl.constexpr,
    TILE: tl.constexpr,
    FIRST: tl.constexpr,
    LAST: tl.constexpr,
):
    """Transform a tile of TILE / COLUMNS lines, STRIDE apart, of COLUMNS consecutive elements."""
    program = tl.program_id(0)
    group = (program // tiles_per_group).to(tl.int64)
    base = group * (TILE // COLUMNS * STRIDE) + (program % tiles_per_group) * COLUMNS
    place = tl.arange(0, TILE)
    offsets = place // COLUMNS * STRIDE + place % COLUMNS
    inside = offsets < numel - base
    values = tl.load(source + base + offsets, mask=inside, other=0.0)
    values = _butterflies(values, TILE, FIRST, LAST) * scale
    tl.store(target + base + offsets, values, mask=inside)


def hadamard(rows: Tensor) -> Tensor:
    """As :func:`comm_hooks.kernels.hadamard.hadamard`, but for the order of additions."""
    length = rows.shape[1]
    bits = length.bit_length() - 1
    source = rows.contiguous()
    target = torch.empty_like(rows, memory_format=torch.contiguous_format)
    numel = rows.numel()
    done = min(bits, _TILE.bit_length() - 1)
    scale = 1 / math.sqrt(length)
    launch(
        _transform,
        triton.cdiv(numel, _TILE),
        source,
        target,
        numel,
        scale,
        1,
        STRIDE=_TILE,
        COLUMNS=_TILE,
        TILE=_TILE,
        FIRST=0,
        LAST=done,
        warps=_WARPS,
    )
    while done < bits:
        step = min(bits - done, (_TILE // _COLUMNS).bit_length() - 1)
        stride, columns = 1 << done, _TILE >> step
        launch(
            _transform,
            numel // _TILE,
            target,
            target,
            numel,
            1.0,
            stride // columns,
            STRIDE=stride,
            COLUMNS=columns,
            TILE=_TILE,
            FIRST=columns.bit_length() - 1,
            LAST=_TILE.bit_length() - 1,
            warps=_WARPS,
        )
        done += step
    return target
