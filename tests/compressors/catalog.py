"""Every compressor in the configurations that the contract tests go through.

:data:`TRAITS` has one representative of each trait; :func:`representative` marks all others slow.
"""

from collections.abc import Iterable
from typing import Any

import pytest

from comm_hooks import (
    SRHT,
    Cocktail,
    Compressor,
    CountSketch,
    DCTTopK,
    GaussianSketch,
    Identity,
    PermK,
    Quantize,
    RandomK,
    Sign,
    TopK,
)

ALL: list[Compressor] = [
    CountSketch(ratio=0.1),
    CountSketch(ratio=1.0),
    SRHT(ratio=0.1),
    SRHT(ratio=1.0),
    GaussianSketch(ratio=0.2),
    GaussianSketch(ratio=0.2, block_size=64),
    TopK(density=0.05),
    TopK(density=0.05, value_bits=1),
    TopK(density=0.05, value_bits=2),
    TopK(density=0.05, value_bits=3, index_code="rice"),
    TopK(density=0.02, value_bits=1, block_size=64, index_code="rice"),
    TopK(density=0.05, value_bits=4),
    TopK(density=1.0, value_bits=32),
    TopK(density=1.0, block_size=7, value_bits=1),
    TopK(density=1.0, block_size=7, value_bits=2),
    TopK(density=0.1, block_size=100, value_bits=32),
    TopK(density=0.2, value_bits=1, index_code="rice", overlap=0.5),
    Cocktail(),
    Cocktail(mask=0.5, density=0.5, value_bits=1, block_size=64),
    Cocktail(mask=1.0, density=1.0, value_bits=32),
    DCTTopK(),
    DCTTopK(chunk=8, density=0.1, value_bits=2),
    DCTTopK(chunk=1, density=1.0, value_bits=32),
    RandomK(density=0.1),
    RandomK(density=0.1, unbiased=False),
    RandomK(density=1.0),
    PermK(),
    Sign(),
    Sign(block_size=64),
    Sign(block_size=12),
    Sign(block_size=None),
    Sign(block_size=None, scale="rms"),
    Sign(block_size=64, scale="rms"),
    Quantize(bits=8),
    Quantize(bits=4),
    Quantize(bits=2, block_size=16),
    Quantize(bits=1),
    Quantize(bits=4, stochastic=True),
    Quantize(bits=1, block_size=32, stochastic=True),
    Identity(),
]

LINEAR, SPARSE, PER_RANK, ONE_BIT, DENSE = (
    CountSketch(ratio=0.1),
    TopK(density=0.05),
    PermK(),
    Sign(),
    Quantize(bits=4),
)
TRAITS: list[Compressor] = [LINEAR, SPARSE, PER_RANK, ONE_BIT, DENSE]


def representative(cases: Iterable[Any]) -> list[Any]:
    """Return the cases of a parametrization, slow but for the first of each trait's class.

    Args:
        cases: compressors, or tuples that begin with one; of equal tails the first counts.
    """
    seen: set[Any] = set()
    marked = []
    for case in cases:
        values = case if isinstance(case, tuple) else (case,)
        key = (type(values[0]), *values[1:])
        is_fast = key not in seen and type(values[0]) in map(type, TRAITS)
        seen.add(key)
        name = "-".join(map(str, values))
        marked.append(pytest.param(*values, id=name, marks=() if is_fast else pytest.mark.slow))
    return marked
