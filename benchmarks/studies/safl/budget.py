"""Sketches and other compressors of a given size, and what they cost in bytes."""

import math
from collections.abc import Callable

from comm_hooks.compressors import SRHT, Compressor, CountSketch, GaussianSketch
from comm_hooks.wire.gathered_header import HEADER_NBYTES
from comm_hooks.wire.summed_header import summed_header_nbytes

FAMILIES = ("count_sketch", "srht", "gaussian_sketch")
SERVERS = ("adam", "amsgrad")

BETAS = (0.9, 0.99)
"""Of all adaptive methods.  A run of a hundred rounds is too short for 0.999."""

LOCAL_LR = 0.1

_MATRIX = 1 << 19
# Halvings of (0, 1]: fine enough for one element in a hundred million.
_HALVINGS = 40


def all_reduced(payload: int, ranks: int) -> float:
    """Return what a rank sends to sum payloads."""
    return 2 * (ranks - 1) * (payload + summed_header_nbytes(ranks)) / ranks


def sharded(compressor: Compressor, numel: int, ranks: int) -> float:
    """Return what a rank sends if each of them owns a shard of a vector of ``numel`` elements."""
    payload = compressor.payload_nbytes(-(-numel // ranks), world_size=ranks)
    return 2 * (ranks - 1) * (payload + HEADER_NBYTES)


def nearest(cost: Callable[[float], float], budget: float) -> float:
    """Return the fraction in (0, 1] whose cost is nearest to a budget.

    Args:
        cost: of a fraction; does not fall.
        budget: in the same unit.

    Example::

        >>> round(nearest(lambda fraction: 1000 * fraction, 250), 6)
        0.25
    """
    low, high = 0.0, 1.0
    for _ in range(_HALVINGS):
        middle = (low + high) / 2
        if cost(middle) <= budget:
            low = middle
        else:
            high = middle
    return high if low == 0 or budget - cost(low) > cost(high) - budget else low


def make_sketch(family: str, ratio: float) -> Compressor:
    """Return a sketch of that ratio."""
    if family == "count_sketch":
        return CountSketch(ratio)
    if family == "srht":
        return SRHT(ratio)
    # Blocks as large as a matrix of half a million numbers allows, so that a small sketch has
    # the whole model in one block, and a large one does not take minutes.
    return GaussianSketch(ratio, block_size=max(1, math.isqrt(round(_MATRIX / ratio))))
