"""The places of the largest elements of every block."""

import numpy as np
import numpy.typing as npt
import torch

from comm_hooks.kernels.triton import LARGEST_BLOCK, available

# 512 kB of magnitudes stay in the cache of a core while they are looked at several times.
_PIECE = 1 << 17
_MAGNITUDE = np.int32(0x7FFFFFFF)

_Ints = npt.NDArray[np.int32]
_Indices = npt.NDArray[np.int64]


def block_top_k(vectors: torch.Tensor, count: int) -> torch.Tensor:
    """Return the places of the ``count`` elements of largest magnitude of every block, ascending.

    Args:
        vectors: (n, blocks, size), float32.
        count: 1 to ``size``.

    Returns:
        (n, blocks, count), int64.  Which of the elements of equal magnitude are taken is arbitrary,
        but the same at every call.  NaN counts as larger than infinity.

    Example::

        >>> block_top_k(torch.tensor([[[0.0, -3.0, 1.0, 2.0]]]), 2)
        tensor([[[1, 3]]])
    """
    if available(vectors) and vectors.shape[2] <= LARGEST_BLOCK:
        from comm_hooks.kernels.triton import top_k_feedback

        return top_k_feedback.block_top_k(vectors, count)
    if vectors.device.type == "cpu":
        return _block_top_k_in_pieces(vectors, count)
    return reference_block_top_k(vectors, count)


def reference_block_top_k(vectors: torch.Tensor, count: int) -> torch.Tensor:
    """Do the same as :func:`block_top_k` in the plainest way."""
    return vectors.abs().topk(count, dim=2, sorted=False).indices.sort(dim=2).values


def _block_top_k_in_pieces(vectors: torch.Tensor, count: int) -> torch.Tensor:
    """Find the places through bounds, so that few elements are compared with each other.

    The bits of non-negative floats are ordered as the floats are, so magnitudes are compared as
    integers.  For every block:

    1. a lower bound of the count-th largest magnitude (:func:`_lower_bounds`);
    2. the elements above the bound are candidates: for 64 of 4096, about 73.  Where they are fewer
       than ``count`` (zeros, say), so are as many of those equal to the bound as are missing;
    3. the count-th largest of the candidates is the threshold (:func:`_thresholds`);
    4. what is above the threshold is taken, and as many of those equal to it as are missing.

    Of equal ones the first are taken.
    """
    n, blocks, size = vectors.shape
    bits = vectors.detach().contiguous().numpy().view(np.int32).reshape(n * blocks, size)
    places = np.empty((n * blocks, count), np.int64)
    step = min(len(bits), max(1, _PIECE // size))
    magnitudes = np.empty((step, size), np.int32)
    folded = np.empty((step, size), np.int32)
    is_candidate = np.empty((step, size), np.bool_)
    for first in range(0, len(bits), step):
        piece = bits[first : first + step]
        rows = len(piece)
        taken = _top_k_of_piece(
            np.bitwise_and(piece, _MAGNITUDE, out=magnitudes[:rows]),
            count,
            folded[:rows],
            is_candidate[:rows],
        )
        starts = np.arange(0, rows * size, size)[:, None]
        np.subtract(taken.reshape(rows, count), starts, out=places[first : first + rows])
    return torch.from_numpy(places).view(n, blocks, count)


def _top_k_of_piece(
    magnitudes: _Ints, count: int, folded: _Ints, is_candidate: npt.NDArray[np.bool_]
) -> _Indices:
    """Return the ascending indices into ``magnitudes.ravel()`` of ``count`` elements of each row.

    ``folded`` and ``is_candidate``, of the same shape, are overwritten.
    """
    rows, size = magnitudes.shape
    bounds = _lower_bounds(magnitudes, count, folded)
    np.greater(magnitudes, bounds[:, None], out=is_candidate)
    candidates = np.flatnonzero(is_candidate)
    owners = candidates // size
    tallies = np.bincount(owners, minlength=rows)
    short = np.flatnonzero(tallies < count)
    if short.size:
        is_equal = magnitudes[short] == bounds[short, None]
        missing = (count - tallies[short])[:, None]
        is_candidate[short] |= is_equal & (np.cumsum(is_equal, axis=1, dtype=np.int32) <= missing)
        candidates = np.flatnonzero(is_candidate)
        owners = candidates // size
        tallies[short] = count
    if len(candidates) == rows * count:
        return candidates
    values = magnitudes.ravel()[candidates]
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


def _lower_bounds(magnitudes: _Ints, count: int, folded: _Ints) -> _Ints:
    """Return for each row a number that at least ``count`` of its elements reach, (rows,).

    The row is cut into 4 to 8 times ``count`` groups, of elements that are far apart, by taking
    the maximum of its first and second half over and over: vector operations, where groups of
    neighbours would need elements one by one.  ``count`` groups have a maximum that reaches the
    count-th largest of the maxima.
    """
    width = magnitudes.shape[1]
    source = magnitudes
    while width >= 8 * count:
        half = (width + 1) // 2
        paired = width - half
        np.maximum(source[:, :paired], source[:, half:width], out=folded[:, :paired])
        if paired < half and source is magnitudes:
            folded[:, paired] = source[:, paired]
        source, width = folded, half
    if source is magnitudes:
        np.copyto(folded, magnitudes)
    maxima = folded[:, :width]
    maxima.partition(width - count, axis=1)
    return maxima[:, width - count].copy()


def _thresholds(values: _Ints, owners: _Indices, tallies: _Indices, count: int) -> _Ints:
    """Return the count-th largest candidate of each row, (rows,).

    Args:
        values, owners: each candidate's value and its row, in ascending order of rows.
        tallies: how many candidates each row has, at least ``count``.
    """
    longest = int(tallies.max())
    table = np.full((len(tallies), longest), -1, np.int32)
    ranks = np.arange(len(values)) - (np.cumsum(tallies) - tallies)[owners]
    table[owners, ranks] = values
    table.partition(longest - count, axis=1)
    return table[:, longest - count]
