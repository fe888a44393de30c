"""GPU kernels: Count-Sketches with the hash of :class:`~comm_hooks.compressors.CountSketch`.

They hash bit for bit as a CPU does: rotations and offsets of signs, some hundreds of numbers, are
drawn on the CPU, and the signs are those of :mod:`comm_hooks.kernels.triton.random_signs`.

Both directions reach 60 % of the bandwidth of a copy:

* sketch: reads every element once, in runs of consecutive addresses, and writes only the sums.  A
  program owns a range of sums and goes through all rows, so there are no atomic additions and the
  result is the same in every run.  1024 independent loads are under way in each program;
* unsketch: writes every element once; the sketch that it reads is smaller by the ratio.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from comm_hooks.kernels.count_sketch import draw
from comm_hooks.kernels.random_signs import SIGN_WINDOW
from comm_hooks.kernels.triton.launching import launch
from comm_hooks.kernels.triton.random_signs import multiply_signs, negative_bits, on_gpu
from comm_hooks.randomness import Keys

_TILE = 1024
_SUMS = 256
_COLUMNS = 1024


@triton.jit
def _sketch(
    rows,
    sums,
    rotations,
    offsets,
    words,
    numel,
    width,
    count,
    windows,
    tiles,
    WINDOW_BITS: tl.constexpr,
    ONE_WINDOW: tl.constexpr,
    ROWS: tl.constexpr,
    SUMS: tl.constexpr,
):
    """Compute a range of one vector's sketch: add up the elements that are hashed to it."""
    vector = (tl.program_id(0) // tiles).to(tl.int64)
    place = tl.program_id(0) % tiles * SUMS + tl.arange(0, SUMS)
    lines = vector * count
    total = tl.zeros([SUMS], tl.float32)
    for first in range(0, count, ROWS):
        row = first + tl.arange(0, ROWS)
        is_row = row < count
        rotation = tl.load(rotations + lines + row, mask=is_row, other=0)
        column = place[None, :] - rotation[:, None]
        column = tl.where(column < 0, column + width, column)
        element = row[:, None] * width + column
        inside = is_row[:, None] & (place < width)[None, :] & (element < numel)
        starts = offsets + (lines + row[:, None]) * windows
        if ONE_WINDOW:
            sign = tl.load(starts, mask=is_row[:, None], other=0) + column
        else:
            sign = tl.load(starts + (column >> WINDOW_BITS), mask=inside, other=0)
            sign += column & ((1 << WINDOW_BITS) - 1)
        # Out of range a sign's place may be, too: it is read where the table has one.
        sign = tl.where(inside, sign, 0)
        values = tl.load(rows + vector * numel + element, mask=inside, other=0.0)
        total += tl.sum(multiply_signs(values, words, sign), 0)
    tl.store(sums + vector * width + place, total, mask=place < width)


@triton.jit
def _unsketch(
    sketches,
    out,
    rotations,
    offsets,
    words,
    alpha,
    numel,
    width,
    count,
    windows,
    tiles,
    WINDOW_BITS: tl.constexpr,
    COLUMNS: tl.constexpr,
    ADD: tl.constexpr,
):
    """Write the decoded elements of a range of one line, within one window of signs."""
    line = tl.program_id(0) // tiles
    vector = (line // count).to(tl.int64)
    start = tl.program_id(0) % tiles * COLUMNS
    column = start + tl.arange(0, COLUMNS)
    element = line % count * width + column
    inside = (column < width) & (element < numel)
    place = column + tl.load(rotations + line)
    place = tl.where(place < width, place, place - width)
    values = tl.load(sketches + vector * width + place, mask=inside, other=0.0) * alpha
    sign = tl.load(offsets + line * windows + (start >> WINDOW_BITS))
    sign += column & ((1 << WINDOW_BITS) - 1)
    values = multiply_signs(values, words, sign)
    target = out + vector * numel + element
    if ADD:
        values += tl.load(target, mask=inside, other=0.0)
    tl.store(target, values, mask=inside)


def sketch(rows: Tensor, width: int, keys: Keys) -> Tensor:
    """Like :func:`comm_hooks.kernels.count_sketch.sketch`, with additions in another order."""
    rows = rows.contiguous()
    rotations, offsets = draw(keys, rows.shape[1], width)
    count = rotations.shape[1]
    windows = offsets.shape[1] // count
    sums = torch.empty(len(rows), width, device=rows.device, dtype=torch.float32)
    columns = min(_SUMS, triton.next_power_of_2(width))
    tiles = triton.cdiv(width, columns)
    launch(
        _sketch,
        len(rows) * tiles,
        rows,
        sums,
        on_gpu(rotations, rows.device),
        on_gpu(offsets, rows.device),
        negative_bits(rows.device),
        rows.shape[1],
        width,
        count,
        windows,
        tiles,
        WINDOW_BITS=SIGN_WINDOW.bit_length() - 1,
        ONE_WINDOW=windows == 1,
        ROWS=min(_TILE // columns, triton.next_power_of_2(count)),
        SUMS=columns,
    )
    return sums


def unsketch(out: Tensor, sketches: Tensor, keys: Keys, *, alpha: float, add: bool) -> None:
    """Like :func:`comm_hooks.kernels.count_sketch.unsketch`, bit for bit."""
    width = sketches.shape[1]
    rotations, offsets = draw(keys, out.shape[1], width)
    count = rotations.shape[1]
    columns = min(_COLUMNS, triton.next_power_of_2(width))
    tiles = triton.cdiv(width, columns)
    launch(
        _unsketch,
        rotations.size * tiles,
        sketches.contiguous(),
        out,
        on_gpu(rotations, out.device),
        on_gpu(offsets, out.device),
        negative_bits(out.device),
        alpha,
        out.shape[1],
        width,
        count,
        offsets.shape[1] // count,
        tiles,
        WINDOW_BITS=SIGN_WINDOW.bit_length() - 1,
        COLUMNS=columns,
        ADD=add,
    )
