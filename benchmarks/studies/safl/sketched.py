"""Sketches of any family and size, and what SAFL is run with."""

import math

from comm_hooks.compressors import SRHT, Compressor, CountSketch, GaussianSketch

FAMILIES = ("count_sketch", "srht", "gaussian_sketch")
SERVERS = ("adam", "amsgrad")

BETAS = (0.9, 0.99)
"""Of all adaptive methods.  A run of a hundred rounds is too short for 0.999."""

LOCAL_LR = 0.1

_MATRIX = 1 << 19


def make_sketch(family: str, ratio: float) -> Compressor:
    """Return a sketch of that ratio."""
    if family == "count_sketch":
        return CountSketch(ratio)
    if family == "srht":
        return SRHT(ratio)
    # Blocks as large as a matrix of half a million numbers allows, so that a small sketch has
    # the whole model in one block, and a large one does not take minutes.
    return GaussianSketch(ratio, block_size=max(1, math.isqrt(round(_MATRIX / ratio))))
