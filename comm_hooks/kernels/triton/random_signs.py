"""GPU kernel: multiply by random signs, equal to those of a CPU.

The table is packed into bits, 260 kB, which fit the caches; the float32 table would double the
traffic.  The bit of a sign is moved to the sign bit of the element, so a GPU draws the same bits as
a CPU, and sketches stay unbiased over their keys.

Multiplying reaches 60 % of the bandwidth of a copy.
"""

import functools

import numpy as np
import numpy.typing as npt
import torch
import triton
import triton.language as tl
from torch import Tensor

from comm_hooks.kernels.random_signs import SIGN_WINDOW, sign_offsets, sign_table
from comm_hooks.kernels.triton.launching import launch
from comm_hooks.randomness import Keys
from comm_hooks.transfers import to_device

_TILE = 2048


@functools.lru_cache(maxsize=8)
def negative_bits(device: torch.device) -> Tensor:
    """Return the table of signs in int32 words: bit i % 32 of word i // 32 is 1 if sign i is -1."""
    signs = sign_table(torch.device("cpu")).numpy()
    return torch.from_numpy(np.packbits(signs < 0, bitorder="little").view(np.int32)).to(device)


def on_gpu(draws: npt.NDArray[np.int64], device: torch.device) -> Tensor:
    """Copy numbers drawn on the CPU to the GPU as int32, without waiting for the GPU."""
    return to_device(torch.from_numpy(draws.astype(np.int32)), device)


@triton.jit
def multiply_signs(values, words, places):
    """Multiply float32 values by the signs at ``places`` of the table ``words``."""
    word = tl.load(words + (places >> 5))
    flips = (word >> (places & 31)) << 31
    return (values.to(tl.int32, bitcast=True) ^ flips).to(tl.float32, bitcast=True)


@triton.jit
def _multiply(
    rows, offsets, words, numel, windows, tiles, WINDOW_BITS: tl.constexpr, TILE: tl.constexpr
):
    vector = (tl.program_id(0) // tiles).to(tl.int64)
    start = tl.program_id(0) % tiles * TILE
    element = start + tl.arange(0, TILE)
    target = rows + vector * numel + element
    values = tl.load(target, mask=element < numel, other=0.0)
    sign = tl.load(offsets + vector * windows + (start >> WINDOW_BITS))
    sign += element & ((1 << WINDOW_BITS) - 1)
    tl.store(target, multiply_signs(values, words, sign), mask=element < numel)


def multiply_signs_(rows: Tensor, keys: Keys) -> Tensor:
    """Like :func:`comm_hooks.kernels.random_signs.multiply_signs_`; ``rows`` are contiguous."""
    offsets = sign_offsets(keys, rows.shape[1])
    tiles = triton.cdiv(rows.shape[1], _TILE)
    launch(
        _multiply,
        len(rows) * tiles,
        rows,
        on_gpu(offsets, rows.device),
        negative_bits(rows.device),
        rows.shape[1],
        offsets.shape[1],
        tiles,
        WINDOW_BITS=SIGN_WINDOW.bit_length() - 1,
        TILE=_TILE,
    )
    return rows
