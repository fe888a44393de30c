"""Random numbers that are equal on all ranks without communication.

Every random number of an exchange is a pure function of a *key*, an unsigned 64-bit integer derived
from (seed, step, parameter name).  The numbers come from a counter-based generator (SplitMix64,
Steele, Lea & Flood, OOPSLA 2014): no state to save, and equal on every platform and version.
(NumPy documents such a guarantee for its bit generators, but not for the distributions of its
``Generator``; ``torch.Generator`` has none.)
"""

import functools
import hashlib
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

_MASK = (1 << 64) - 1
_GOLDEN = 0x9E3779B97F4A7C15
_MULTIPLIER_1 = 0xBF58476D1CE4E5B9
_MULTIPLIER_2 = 0x94D049BB133111EB
_PIECE = 1 << 14

Keys = Sequence[int] | npt.NDArray[np.uint64]
"""Random keys, one per vector to compress: 64-bit integers, or an array (n,)."""


@dataclass(frozen=True, eq=False)
class Draw:
    """The source of a compressor's random numbers: equal arguments give equal numbers.

    Args:
        keys: the random keys, one for each vector to compress, the same on all ranks.
        rank, world_size: the sender's rank and the number of ranks, for compressors that use them.
    """

    keys: Keys
    rank: int = 0
    world_size: int = 1


def mix64(value: int) -> int:
    """Return the SplitMix64 output for counter ``value``: a bijection of 64-bit integers."""
    value = (value + _GOLDEN) & _MASK
    value = ((value ^ (value >> 30)) * _MULTIPLIER_1) & _MASK
    value = ((value ^ (value >> 27)) * _MULTIPLIER_2) & _MASK
    return value ^ (value >> 31)


def _mix64(values: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    """Return :func:`mix64` of each value, in an array of the same shape."""
    return _scramble_(values + np.uint64(_GOLDEN))


def _scramble_(values: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    values ^= values >> np.uint64(30)
    values *= np.uint64(_MULTIPLIER_1)
    values ^= values >> np.uint64(27)
    values *= np.uint64(_MULTIPLIER_2)
    values ^= values >> np.uint64(31)
    return values


@functools.lru_cache(maxsize=1 << 16)
def _name_hash(name: str) -> int:
    return int.from_bytes(hashlib.blake2b(name.encode(), digest_size=8).digest(), "little")


@functools.lru_cache(maxsize=1 << 12)
def _name_hashes(names: tuple[str, ...]) -> npt.NDArray[np.uint64]:
    return np.array([_name_hash(name) for name in names], dtype=np.uint64)


def derive_key(seed: int, step: int, name: str) -> int:
    """Return the random key of one parameter in one round of the exchange.

    Args:
        seed: the user's seed, equal on all ranks.
        step: the number of the round, from 0.
        name: the parameter's fully qualified name.
    """
    return mix64(_round_key(seed, step) ^ _name_hash(name))


def derive_keys(seed: int, step: int, names: tuple[str, ...]) -> npt.NDArray[np.uint64]:
    """Return :func:`derive_key` of each parameter name, as an array (len(names),)."""
    return _mix64(_name_hashes(names) ^ np.uint64(_round_key(seed, step)))


def _round_key(seed: int, step: int) -> int:
    return mix64(mix64(seed & _MASK) ^ (step & _MASK))


def as_array(keys: Keys) -> npt.NDArray[np.uint64]:
    """Return keys as an array (n,); integers are taken modulo 2^64."""
    if isinstance(keys, np.ndarray):
        return keys
    return np.array([key & _MASK for key in keys], dtype=np.uint64)


def fork(keys: Keys, stream: int) -> npt.NDArray[np.uint64]:
    """Return new keys for random numbers of stream ``stream``, independent of other streams."""
    return fork_all(keys, range(stream, stream + 1))[0]


def fork_all(keys: Keys, streams: range) -> npt.NDArray[np.uint64]:
    """Return :func:`fork` for each stream number, as an array (len(streams), len(keys))."""
    salts = _mix64(np.arange(streams.start + 1, streams.stop + 1, dtype=np.uint64))
    return _mix64(as_array(keys) ^ salts[:, None])


def random_bits(keys: Keys, count: int) -> npt.NDArray[np.uint64]:
    """Return ``count`` uniform 64-bit integers for each key, as an array (len(keys), count)."""
    start = as_array(keys)[:, None]
    bits = np.empty((len(keys), count), dtype=np.uint64)
    # In pieces that stay in the cache: a third of the time for millions of numbers.
    for first in range(0, count, _PIECE):
        piece = bits[:, first : first + _PIECE]
        counter = np.arange(first + 1, first + 1 + piece.shape[1], dtype=np.uint64)
        _scramble_(np.add(start, counter * np.uint64(_GOLDEN), out=piece))
    return bits


def random_unit(keys: Keys, count: int) -> npt.NDArray[np.float64]:
    """Return uniform numbers in [0, 1) with 53 random bits, as an array (len(keys), count)."""
    return (random_bits(keys, count) >> np.uint64(11)) * 2.0**-53


def random_below(
    keys: Keys, count: int, bound: int | npt.NDArray[np.int64]
) -> npt.NDArray[np.int64]:
    """Return uniform integers in [0, bound), as an array (len(keys), count).

    ``bound`` may be an array of ``count`` bounds.  The bias is below ``bound / 2**53``.
    """
    return (random_unit(keys, count) * bound).astype(np.int64)


def stratified_indices(
    keys: Keys, numel: int, count: int
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """Draw one index from each of ``count`` strata: runs of ``range(numel)`` of nearly equal size.

    The indices are distinct, at a cost of O(count), where a random permutation costs O(numel).  An
    index of stratum j is drawn with probability exactly ``1 / sizes[j]``.

    Returns:
        ``(indices, sizes)``: shapes (len(keys), count), ascending in each row, and (count,).
    """
    edges = np.arange(count + 1, dtype=np.int64) * numel // count
    sizes = np.diff(edges)
    return edges[:-1] + random_below(keys, count, sizes), sizes
