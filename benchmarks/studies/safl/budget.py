"""Which setting of a compressor costs a given number of bytes."""

from collections.abc import Callable

from comm_hooks.compressors.base import Compressor
from comm_hooks.wire.gathered_header import HEADER_NBYTES
from comm_hooks.wire.summed_header import summed_header_nbytes

MakeCompressor = Callable[[float], Compressor]

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
