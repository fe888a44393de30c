"""Random signs, read from a fixed table at offsets drawn from keys."""

import functools

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from comm_hooks.kernels.operators import if_contiguous, operator
from comm_hooks.randomness import Keys, random_below, random_bits

SIGN_TABLE_SIZE = 1 << 21
# Two windows coincide with probability 1 / SIGN_TABLE_SIZE and then add up coherently, which raises
# the variance of a sketched constant vector by WINDOW / SIGN_TABLE_SIZE: 1.6 %.
SIGN_WINDOW = 1 << 15
_TABLE_KEY = 0x9E3779B97F4A7C15


@functools.lru_cache(maxsize=8)
def sign_table(device: torch.device) -> Tensor:
    """Return the fixed table of random signs, float32, with room for a window at any offset.

    The table holds exactly as many +1 as -1, so the product of two signs read at independent
    uniform offsets has mean exactly zero: sketches built on it are unbiased over their keys, not
    only over the choice of the table.
    """
    order = np.argsort(random_bits([_TABLE_KEY], SIGN_TABLE_SIZE)[0], kind="stable")
    signs = np.where(order < SIGN_TABLE_SIZE // 2, np.float32(1), np.float32(-1))
    return torch.from_numpy(np.concatenate([signs, signs[:SIGN_WINDOW]])).to(device)


def sign_offsets(keys: Keys, numel: int, lines: int = 1) -> npt.NDArray[np.int64]:
    """Return the offset in the sign table of each window of signs, (len(keys), windows).

    Each of ``lines`` lines of ``numel`` elements has windows of its own.
    """
    return random_below(keys, lines * -(-numel // SIGN_WINDOW), SIGN_TABLE_SIZE)


@operator(triton=if_contiguous)
def multiply_signs_(rows: Tensor, keys: Keys) -> Tensor:
    """Multiply each row of ``rows`` (n, numel), in place, by the random signs of its key."""
    table = sign_table(rows.device)
    offsets = sign_offsets(keys, rows.shape[1])
    for row, row_offsets in zip(rows, offsets.tolist(), strict=True):
        for piece, offset in zip(row.split(SIGN_WINDOW), row_offsets, strict=True):
            piece.mul_(table[offset : offset + piece.numel()])
    return rows
