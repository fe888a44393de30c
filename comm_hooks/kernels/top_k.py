"""Choose the elements of largest magnitude of every block, after adding a residual."""

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from comm_hooks.kernels.operators import operator
from comm_hooks.kernels.pieces import cut
from comm_hooks.kernels.residual import Residual
from comm_hooks.kernels.triton import LARGEST_BLOCK

# 512 kB of magnitudes stay in the cache of a core while they are looked at several times.
_PIECE = 1 << 17
_MAGNITUDE = np.int32(0x7FFFFFFF)

_Ints = npt.NDArray[np.int32]
_Indices = npt.NDArray[np.int64]


def _fits(rows: Tensor, size: int, *_: object, **__: object) -> bool:
    return size <= LARGEST_BLOCK


@operator(triton=_fits)
def block_top_k(
    rows: Tensor, size: int, count: int, residual: Residual | None = None
) -> tuple[Tensor, Tensor]:
    """Choose the ``count`` elements of largest magnitude of every block.

    Args:
        rows: (n, numel), float32.
        size: the number of elements per block.  The last block of a row is padded with zeros.
        count: the number of chosen elements per block, 1 to ``size``.
        residual: the residual to be added to ``rows`` first, in place; None: nothing is added.

    Returns:
        ``(places, values)``: the places in the block, int64 and ascending, and the elements there,
        both (n, ceil(numel / size), count).  Of equal magnitudes the first are taken.  NaN counts
        as larger than infinity.
    """
    if residual:
        residual.add_to(rows)
    blocks = cut(rows, size)
    # A stable sort takes the first of equal ones.
    order = blocks.abs().sort(dim=2, descending=True, stable=True).indices
    places = order[..., :count].sort(dim=2).values
    return places, blocks.gather(2, places)


@block_top_k.fast()
def _block_top_k_in_pieces(
    rows: Tensor, size: int, count: int, residual: Residual | None = None
) -> tuple[Tensor, Tensor]:
    """The version for the CPU: find the places through bounds, so that few elements are compared.

    The bits of non-negative floats are ordered as the floats are, so magnitudes are compared as
    integers.  For every block, while a piece of the vectors is in the cache:

    1. the residual is added;
    2. a lower bound of the count-th largest magnitude (:func:`_lower_bounds`);
    3. the elements that reach it are candidates: for 64 of 4096, about 74.

    Then for all blocks together:

    4. the count-th largest of the candidates is the threshold (:func:`_thresholds`);
    5. elements above the threshold are taken, and as many equal to it as are missing.
    """
    if residual and (rows.shape[1] % size or not rows.is_contiguous()):
        residual.add_to(rows)
        residual = None
    blocks = cut(rows.detach(), size)
    vectors = blocks.reshape(-1, size)
    residuals = residual.in_blocks(size) if residual else None
    bits = vectors.numpy().view(np.int32)
    step = min(len(bits), max(1, _PIECE // size))
    magnitudes = np.empty((step, size), np.int32)
    is_candidate = np.empty((step, size), np.bool_)
    found: list[_Indices] = []
    values: list[_Ints] = []
    for first in range(0, len(bits), step):
        here = slice(first, first + step)
        if residuals:
            residuals.of(here).add_to(vectors[here])
        piece = bits[here]
        height = len(piece)
        np.bitwise_and(piece, _MAGNITUDE, out=magnitudes[:height])
        candidates = _candidates(magnitudes[:height], count, is_candidate[:height])
        values.append(magnitudes.ravel()[candidates])
        found.append(np.add(candidates, first * size, out=candidates))
    taken = _largest(np.concatenate(found), np.concatenate(values), len(bits), size, count)
    starts = np.arange(0, len(bits) * size, size)[:, None]
    places = torch.from_numpy(taken.reshape(len(bits), count) - starts)
    places = places.view(*blocks.shape[:2], count)
    return places, blocks.gather(2, places)


def _candidates(magnitudes: _Ints, count: int, is_candidate: npt.NDArray[np.bool_]) -> _Indices:
    """Return indices, ascending, into ``magnitudes.ravel()`` of elements that may be chosen.

    Each row has at least ``count`` of them.  ``is_candidate``, of the same shape, is overwritten.
    """
    bounds = _lower_bounds(magnitudes, count)
    # Elements that reach the bound, but of zeros, which may be thousands, only as many as needed.
    is_zero_bound = bounds == 0
    np.greater(magnitudes, (bounds - ~is_zero_bound)[:, None], out=is_candidate)
    if is_zero_bound.any():
        short = np.flatnonzero(is_zero_bound)
        missing = count - is_candidate[short].sum(1, keepdims=True)
        is_zero = magnitudes[short] == 0
        is_candidate[short] |= is_zero & (np.cumsum(is_zero, axis=1, dtype=np.int32) <= missing)
    return np.flatnonzero(is_candidate)


def _largest(candidates: _Indices, values: _Ints, rows: int, size: int, count: int) -> _Indices:
    """Return the indices of the ``count`` largest candidates of each row, ascending.

    Args:
        candidates: ascending indices of elements of rows of ``size``, at least ``count`` per row.
        values: the magnitudes of the candidates.
    """
    if len(candidates) == rows * count:
        return candidates
    owners = candidates // size
    tallies = np.bincount(owners, minlength=rows)
    thresholds = _thresholds(values, owners, tallies, count)[owners]
    is_taken = values >= thresholds
    if np.count_nonzero(is_taken) > rows * count:
        is_above = values > thresholds
        missing = count - np.bincount(owners[is_above], minlength=rows)
        is_equal = is_taken & ~is_above
        equals = np.cumsum(is_equal)
        # How many equal ones there were before the row's first candidate.
        before = np.concatenate([[0], equals])[np.cumsum(tallies) - tallies]
        is_taken = is_above | (is_equal & (equals - before[owners] <= missing[owners]))
    return candidates[is_taken]


def _lower_bounds(magnitudes: _Ints, count: int) -> _Ints:
    """Return a lower bound of each row's count-th largest magnitude, (rows,).

    A row is cut into 4 to 8 times ``count`` groups of elements that are far apart, so that maxima
    are vector operations.  ``count`` groups have a maximum that reaches the count-th largest.
    """
    size = magnitudes.shape[1]
    groups = size >> max(0, (size // (4 * count)).bit_length() - 1)
    members = size // groups
    # What is left over, fewer than one element for each group, would hardly raise the bound.
    grouped = torch.from_numpy(magnitudes)[:, : members * groups].unflatten(1, (members, groups))
    maxima = grouped.amax(1).numpy()  # NumPy takes twice as long
    maxima.partition(groups - count, axis=1)
    return maxima[:, groups - count]


def _thresholds(values: _Ints, owners: _Indices, tallies: _Indices, count: int) -> _Ints:
    """Return the value of the count-th largest candidate of each row, (rows,).

    Args:
        values, owners: the value and row of each candidate, in ascending order of rows.
        tallies: the number of candidates of each row, at least ``count``.
    """
    longest = int(tallies.max())
    table = np.full((len(tallies), longest), -1, np.int32)
    ranks = np.arange(len(values)) - (np.cumsum(tallies) - tallies)[owners]
    table[owners, ranks] = values
    table.partition(longest - count, axis=1)
    return table[:, longest - count]
