"""Compute Count-Sketches with the structured hash of :class:`~comm_hooks.CountSketch`.

The vector is cut into lines of ``width`` elements.  Element j of line i is added to the sum
``(j + rotations[i]) % width``, with the sign ``table[offsets[i, j // W] + j % W]``, where the table
is :func:`~comm_hooks.kernels.random_signs.sign_table` and W = ``SIGN_WINDOW``.
"""

from collections.abc import Iterator

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from comm_hooks.kernels.operators import always, if_contiguous, operator
from comm_hooks.kernels.random_signs import SIGN_WINDOW, sign_offsets, sign_table
from comm_hooks.randomness import Keys, fork, random_below
from comm_hooks.transfers import to_device

# Below this width many lines are taken at once, about _BATCH elements: one by one they take longer
# to ask for than to compute.
_NARROW = 512
_BATCH = 1 << 16

Draws = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float32]


def draw(keys: Keys, numel: int, width: int) -> tuple[Draws, Draws]:
    """Return the random rotations and sign offsets of each key.

    Returns:
        ``(rotations, offsets)`` for the ``count = ceil(numel / width)`` lines of a row and the
        ``windows = ceil(width / SIGN_WINDOW)`` windows of a line: int64 (len(keys), count) and
        (len(keys), count * windows).
    """
    count = -(-numel // width)
    rotations = random_below(fork(keys, 0), count, width)
    return rotations, sign_offsets(fork(keys, 1), width, count)


@operator(triton=always)
def sketch(rows: Tensor, width: int, keys: Keys) -> Tensor:
    """Return the Count-Sketches (n, width), float32, of rows (n, numel), float32."""
    places, signs = _hash(rows.shape[1], width, keys, rows.device)
    return torch.zeros(len(rows), width, device=rows.device, dtype=torch.float32).scatter_add_(
        1, places, rows * signs
    )


@operator(triton=if_contiguous)
def unsketch(out: Tensor, sketches: Tensor, keys: Keys, *, alpha: float, add: bool) -> None:
    """Write ``alpha`` times the transpose of :func:`sketch` to ``out``, or add it.

    Args:
        out: (n, numel), float32.
        sketches: (n, width), float32.
        keys: the random keys that were given to :func:`sketch`.
        alpha, add: a factor of the values, and whether to add them to ``out``.
    """
    places, signs = _hash(out.shape[1], sketches.shape[1], keys, out.device)
    values = alpha * sketches.gather(1, places) * signs
    out.copy_(out + values if add else values)


def _hash(numel: int, width: int, keys: Keys, device: torch.device) -> tuple[Tensor, Tensor]:
    """Return each element's index in the sketch, int64, and sign, float32, both (n, numel)."""
    rotations, offsets = draw(keys, numel, width)
    line, column = np.divmod(np.arange(numel), width)
    window, place = np.divmod(column, SIGN_WINDOW)
    windows = -(-width // SIGN_WINDOW)
    places = torch.from_numpy((column + rotations[:, line]) % width)
    in_table = torch.from_numpy(offsets[:, line * windows + window] + place)
    return to_device(places, device), sign_table(device)[to_device(in_table, device)]


@sketch.fast(only_on_cpu=False)
def _sketch(rows: Tensor, width: int, keys: Keys) -> Tensor:
    one_by_one = rows.device.type == "cpu" and width >= _NARROW
    way = _sketch_line_by_line if one_by_one else _sketch_in_batches
    return way(rows, width, *draw(keys, rows.shape[1], width))


@unsketch.fast(only_on_cpu=False)
def _unsketch(out: Tensor, sketches: Tensor, keys: Keys, *, alpha: float, add: bool) -> None:
    one_by_one = out.device.type == "cpu" and sketches.shape[1] >= _NARROW
    way = _unsketch_line_by_line if one_by_one else _unsketch_in_batches
    way(out, sketches, *draw(keys, out.shape[1], sketches.shape[1]), alpha, add)


def _pieces(
    vectors: Floats, sketches: Floats, rotations: Draws, offsets: Draws
) -> Iterator[tuple[bool, Floats, Floats, Floats]]:
    """Yield (is in the first line, elements, their sums, their signs) for each piece of the rows.

    A piece is contiguous in the row, the sketch and the table of signs: it ends with a window of
    signs, and where the rotation wraps around to the first sum.
    """
    numel, width = vectors.shape[1], sketches.shape[1]
    windows = -(-width // SIGN_WINDOW)
    table = sign_table(torch.device("cpu")).numpy()
    drawn = zip(rotations.tolist(), offsets.tolist(), strict=True)
    for vector, sums, (row_rotations, row_offsets) in zip(vectors, sketches, drawn, strict=True):
        for number, offset in enumerate(row_offsets):
            index, window = divmod(number, windows)
            line, begin, rotation = index * width, window * SIGN_WINDOW, row_rotations[index]
            end = min(begin + SIGN_WINDOW, width, numel - line)
            for first, last in _halves(begin, end, width - rotation):
                length = last - first
                place, sign = (first + rotation) % width, offset + first - begin
                yield (
                    index == 0,
                    vector[line + first : line + last],
                    sums[place : place + length],
                    table[sign : sign + length],
                )


def _halves(first: int, last: int, middle: int) -> list[tuple[int, int]]:
    """Return the non-empty parts of ``range(first, last)`` below ``middle`` and from it on."""
    if first < middle < last:
        return [(first, middle), (middle, last)]
    return [(first, last)] if first < last else []


def _sketch_line_by_line(rows: Tensor, width: int, rotations: Draws, offsets: Draws) -> Tensor:
    # numpy, because asking torch for a piece takes as long as computing it.
    vectors = rows.detach().numpy()
    sketches = np.empty((len(vectors), width), np.float32)
    product = np.empty(min(SIGN_WINDOW, width), np.float32)
    for is_first, elements, sums, signs in _pieces(vectors, sketches, rotations, offsets):
        # The first line reaches every sum once.
        values = sums if is_first else product[: len(signs)]
        np.multiply(elements, signs, out=values)
        if not is_first:
            np.add(sums, values, out=sums)
    return torch.from_numpy(sketches)


def _unsketch_line_by_line(
    out: Tensor, sketches: Tensor, rotations: Draws, offsets: Draws, alpha: float, add: bool
) -> None:
    product = np.empty(min(SIGN_WINDOW, sketches.shape[1]), np.float32)
    pieces = _pieces(out.detach().numpy(), (sketches * alpha).numpy(), rotations, offsets)
    for _, elements, sums, signs in pieces:
        values = product[: len(signs)] if add else elements
        np.multiply(sums, signs, out=values)
        if add:
            np.add(elements, values, out=elements)


def _batches(
    numel: int, width: int, rotations: Draws, offsets: Draws, device: torch.device
) -> Iterator[tuple[int, int, int, Tensor, Tensor]]:
    """Yield (row, start, stop, rotations, signs) for batches of whole lines of a row.

    Rotations have the shape (lines, 1), signs (lines, width); the last line may be incomplete.
    """
    count, windows = rotations.shape[1], -(-width // SIGN_WINDOW)
    columns = torch.arange(width, device=device)
    window, place = columns // SIGN_WINDOW, columns % SIGN_WINDOW
    table = sign_table(device)
    rotations_there, offsets_there = (
        to_device(torch.from_numpy(draws), device) for draws in (rotations, offsets)
    )
    step = max(1, _BATCH // width)
    for row, row_offsets in enumerate(offsets_there.view(-1, count, windows)):
        for first in range(0, count, step):
            lines = slice(first, first + step)
            yield (
                row,
                first * width,
                min((first + step) * width, numel),
                rotations_there[row, lines, None],
                table[row_offsets[lines].index_select(1, window) + place],
            )


def _sketch_in_batches(rows: Tensor, width: int, rotations: Draws, offsets: Draws) -> Tensor:
    columns = torch.arange(width, device=rows.device)
    sums = torch.zeros(len(rows), width, device=rows.device, dtype=torch.float32)
    for row, start, stop, shifts, signs in _batches(
        rows.shape[1], width, rotations, offsets, rows.device
    ):
        padding = signs.numel() - (stop - start)
        lines = torch.nn.functional.pad(rows[row, start:stop], (0, padding)).view_as(signs)
        sums[row] += (lines * signs).gather(1, (columns - shifts) % width).sum(0)
    return sums


def _unsketch_in_batches(
    out: Tensor, sketches: Tensor, rotations: Draws, offsets: Draws, alpha: float, add: bool
) -> None:
    width = sketches.shape[1]
    columns = torch.arange(width, device=out.device)
    scaled = sketches * alpha
    for row, start, stop, shifts, signs in _batches(
        out.shape[1], width, rotations, offsets, out.device
    ):
        values = scaled[row][(columns + shifts) % width].mul_(signs).flatten()[: stop - start]
        target = out[row, start:stop]
        if add:
            target.add_(values)
        else:
            target.copy_(values)
