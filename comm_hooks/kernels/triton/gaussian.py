"""GPU kernel: Gaussian noise from a key of 128 bits, generated where it is added.

PyTorch's generators of GPUs have 64 bits of seed.  Here every program runs NumPy's Philox (4x64, 10
rounds; Salmon et al., SC 2011) with a key of 128 bits and the counter of a stream, and draws the
same words as NumPy.

It does not reach 60 % of the bandwidth of a copy: float64 arithmetic takes longer than memory.
"""

import struct

import numpy as np
import torch
import triton
import triton.language as tl
from torch import Tensor

from comm_hooks.kernels.triton import PAIRS
from comm_hooks.kernels.triton.launching import launch
from comm_hooks.transfers import to_device


@triton.jit
def _philox(c0, c1, c2, c3, k0, k1):
    """Return four random words, uint64, of every counter (c0 to c3) under the key (k0, k1)."""
    for _ in tl.static_range(10):
        low0 = c0 * 0xD2E7470EE14C6C93
        low1 = c2 * 0xCA5A826395121157
        high0 = tl.umulhi(c0, 0xD2E7470EE14C6C93)
        high1 = tl.umulhi(c2, 0xCA5A826395121157)
        c0 = high1 ^ c1 ^ k0
        c1 = low1
        c2 = high0 ^ c3 ^ k1
        c3 = low0
        k0 += 0x9E3779B97F4A7C15
        k1 += 0xBB67AE8584CAA73B
    return c0, c1, c2, c3


@triton.jit
def _add_gaussian(values, seeds, numel, TILE: tl.constexpr):
    program = tl.program_id(0).to(tl.int64)
    # NumPy counts before it draws.
    block = (program * TILE + tl.arange(0, TILE) + 1).to(tl.uint64)
    zero = tl.zeros([TILE], tl.uint64)
    k0 = zero + tl.load(seeds).to(tl.uint64, bitcast=True)
    k1 = zero + tl.load(seeds + 1).to(tl.uint64, bitcast=True)
    c2 = zero + tl.load(seeds + 2).to(tl.uint64, bitcast=True)
    c3 = zero + tl.load(seeds + 3).to(tl.uint64, bitcast=True)
    std = tl.load(seeds + 4).to(tl.float64, bitcast=True)
    w0, w1, w2, _ = _philox(block, zero, c2, c3, k0, k1)
    # The least of them is 2^-128: its logarithm is finite.
    u = w0.to(tl.float64) * 2.0**-64 + (w1.to(tl.float64) + 1.0) * 2.0**-128
    angle = w2.to(tl.float64) * 3.4061215800865545e-19  # 2 pi / 2^64
    radius = std * tl.sqrt(-2.0 * tl.log(u))
    first = program * (2 * TILE) + tl.arange(0, TILE)
    second = first + TILE
    value = tl.load(values + first, mask=first < numel, other=0.0).to(tl.float64)
    tl.store(values + first, (value + radius * tl.cos(angle)).to(tl.float32), mask=first < numel)
    value = tl.load(values + second, mask=second < numel, other=0.0).to(tl.float64)
    tl.store(values + second, (value + radius * tl.sin(angle)).to(tl.float32), mask=second < numel)


def add_gaussian_(values: Tensor, std: float, key: int, counter: int) -> None:
    """Like :func:`comm_hooks.kernels.gaussian.add_gaussian_`, up to the last bits of float64.

    It does not wait for the GPU: key and counter are copied in the GPU's order of work.
    """
    words = [key, key >> 64, counter >> 128, counter >> 192]
    packed = struct.pack("<4Qd", *(word & 0xFFFFFFFFFFFFFFFF for word in words), std)
    seeds = torch.from_numpy(np.frombuffer(packed, np.int64).copy())
    launch(
        _add_gaussian,
        triton.cdiv(values.numel(), 2 * PAIRS),
        values,
        to_device(seeds, values.device),
        values.numel(),
        TILE=PAIRS,
    )
