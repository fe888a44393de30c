"""Count-Sketch with the structured hash of :class:`~comm_hooks.CountSketch`.

The vector is cut into lines of ``width`` elements.  Element j of line i is added to the sum
``(j + rotations[i]) % width``, with the sign ``table[offsets[i, j // W] + j % W]``, where the table
is :func:`~comm_hooks.kernels.random_signs.sign_table` and W = ``SIGN_WINDOW``.
"""

from collections.abc import Iterator

import numpy as np
import numpy.typing as npt
import torch

from comm_hooks.kernels.random_signs import SIGN_WINDOW, sign_offsets, sign_table
from comm_hooks.kernels.triton import available
from comm_hooks.randomness import Keys, fork, random_below

# Below this width many lines are taken at once, about _BATCH elements: one by one they take longer
# to ask for than to compute.
_NARROW = 512
_BATCH = 1 << 16

Draws = npt.NDArray[np.int64]


def draw(keys: Keys, numel: int, width: int) -> tuple[Draws, Draws]:
    """Return what a sketch draws from each key.

    Returns:
        ``(rotations, offsets)`` for the ``count = ceil(numel / width)`` lines of a row and the
        ``windows = ceil(width / SIGN_WINDOW)`` windows of a line: int64 (len(keys), count) and
        (len(keys), count * windows).
    """
    count = -(-numel // width)
    rotations = random_below(fork(keys, 0), count, width)
    return rotations, sign_offsets(fork(keys, 1), count * -(-width // SIGN_WINDOW))


def sketch(rows: torch.Tensor, width: int, rotations: Draws, offsets: Draws) -> torch.Tensor:
    """Return the sums (n, width), float32, of rows (n, numel), float32.

    Example::

        >>> rows = torch.ones(1, 6)
        >>> sketch(rows, 2, *draw([3], 6, 2)).shape
        torch.Size([1, 2])
    """
    if available(rows):
        from comm_hooks.kernels.triton import count_sketch as on_gpu

        return on_gpu.sketch(rows, width, rotations, offsets)
    if rows.device.type == "cpu" and width >= _NARROW:
        return _sketch_line_by_line(rows, width, rotations, offsets)
    return _sketch_in_batches(rows, width, rotations, offsets)


def unsketch(
    out: torch.Tensor,
    sketches: torch.Tensor,
    rotations: Draws,
    offsets: Draws,
    *,
    alpha: float,
    add: bool,
) -> None:
    """Write ``alpha`` times the transpose of :func:`sketch` to ``out``, or ``add`` it.

    Args:
        out: (n, numel), float32, contiguous.
        sketches: (n, width), float32.
    """
    if available(out):
        from comm_hooks.kernels.triton import count_sketch as on_gpu

        on_gpu.unsketch(out, sketches, rotations, offsets, alpha=alpha, add=add)
        return
    if out.device.type == "cpu" and sketches.shape[1] >= _NARROW:
        _unsketch_line_by_line(out, sketches, rotations, offsets, alpha, add)
    else:
        _unsketch_in_batches(out, sketches, rotations, offsets, alpha, add)


def reference_sketch(
    rows: torch.Tensor, width: int, rotations: Draws, offsets: Draws
) -> torch.Tensor:
    """Do the same as :func:`sketch` in the plainest way: element by element."""
    places, signs = _hash(rows.shape[1], width, rotations, offsets)
    sums = torch.zeros(len(rows), width, device=rows.device)
    return sums.scatter_add_(1, places.to(rows.device), rows * signs.to(rows.device))


def reference_unsketch(
    out: torch.Tensor,
    sketches: torch.Tensor,
    rotations: Draws,
    offsets: Draws,
    *,
    alpha: float,
    add: bool,
) -> None:
    """Do the same as :func:`unsketch` in the plainest way: element by element."""
    places, signs = _hash(out.shape[1], sketches.shape[1], rotations, offsets)
    values = alpha * sketches.gather(1, places.to(out.device)) * signs.to(out.device)
    out.copy_(out + values if add else values)


def _hash(
    numel: int, width: int, rotations: Draws, offsets: Draws
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the sum and the sign of every element, int64 and float32 (n, numel)."""
    line, column = np.divmod(np.arange(numel), width)
    window, place = np.divmod(column, SIGN_WINDOW)
    windows = -(-width // SIGN_WINDOW)
    places = (column + rotations[:, line]) % width
    table = sign_table(torch.device("cpu"))
    signs = table[torch.from_numpy(offsets[:, line * windows + window] + place)]
    return torch.from_numpy(places), signs


def _pieces(
    numel: int, width: int, rotations: Draws, offsets: Draws
) -> Iterator[Iterator[tuple[int, int, int, int]]]:
    """Yield, per row, (start, stop, first sum, sign offset) of every contiguous piece.

    A piece ends with its window of signs, and where the rotation goes on with the first sum.
    """
    windows = -(-width // SIGN_WINDOW)
    for row_rotations, row_offsets in zip(rotations.tolist(), offsets.tolist(), strict=True):
        yield (
            (line + first, line + last, (first + rotation) % width, offset + first % SIGN_WINDOW)
            for index, rotation in enumerate(row_rotations)
            for line in (index * width,)
            for window, offset in enumerate(row_offsets[index * windows : (index + 1) * windows])
            for first, last in _halves(
                window * SIGN_WINDOW,
                min((window + 1) * SIGN_WINDOW, width, numel - line),
                width - rotation,
            )
        )


def _halves(first: int, last: int, middle: int) -> list[tuple[int, int]]:
    """Return what of ``range(first, last)`` is below ``middle``, and what is not."""
    if first < middle < last:
        return [(first, middle), (middle, last)]
    return [(first, last)] if first < last else []


def _sketch_line_by_line(
    rows: torch.Tensor, width: int, rotations: Draws, offsets: Draws
) -> torch.Tensor:
    # numpy, because asking torch for a piece takes as long as computing it.
    vectors = rows.detach().numpy()
    table = sign_table(rows.device).numpy()
    sums = np.empty((len(vectors), width), np.float32)
    product = np.empty(min(SIGN_WINDOW, width), np.float32)
    row_pieces = _pieces(vectors.shape[1], width, rotations, offsets)
    for vector, totals, pieces in zip(vectors, sums, row_pieces, strict=True):
        for start, stop, place, offset in pieces:
            length = stop - start
            total = totals[place : place + length]
            # The first line reaches every sum once.
            values = total if start < width else product[:length]
            np.multiply(vector[start:stop], table[offset : offset + length], out=values)
            if start >= width:
                np.add(total, values, out=total)
    return torch.from_numpy(sums)


def _unsketch_line_by_line(
    out: torch.Tensor,
    sketches: torch.Tensor,
    rotations: Draws,
    offsets: Draws,
    alpha: float,
    add: bool,
) -> None:
    vectors = out.detach().numpy()
    width = sketches.shape[1]
    table = sign_table(out.device).numpy()
    scaled = (sketches * alpha).numpy()
    product = np.empty(min(SIGN_WINDOW, width), np.float32)
    row_pieces = _pieces(vectors.shape[1], width, rotations, offsets)
    for vector, sums, pieces in zip(vectors, scaled, row_pieces, strict=True):
        for start, stop, place, offset in pieces:
            length = stop - start
            target = vector[start:stop]
            values = product[:length] if add else target
            np.multiply(sums[place : place + length], table[offset : offset + length], out=values)
            if add:
                np.add(target, values, out=target)


def _batches(
    numel: int, width: int, rotations: Draws, offsets: Draws, device: torch.device
) -> Iterator[tuple[int, int, int, torch.Tensor, torch.Tensor]]:
    """Yield (row, start, stop, rotations, signs) of batches of whole lines.

    Rotations have the shape (lines, 1), signs (lines, width); the last line may stick out.
    """
    count, windows = rotations.shape[1], -(-width // SIGN_WINDOW)
    columns = torch.arange(width, device=device)
    window, place = columns // SIGN_WINDOW, columns % SIGN_WINDOW
    table = sign_table(device)
    rotations_there, offsets_there = (
        torch.from_numpy(draws).to(device) for draws in (rotations, offsets)
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


def _sketch_in_batches(
    rows: torch.Tensor, width: int, rotations: Draws, offsets: Draws
) -> torch.Tensor:
    columns = torch.arange(width, device=rows.device)
    sums = torch.zeros(len(rows), width, device=rows.device)
    for row, start, stop, shifts, signs in _batches(
        rows.shape[1], width, rotations, offsets, rows.device
    ):
        padding = signs.numel() - (stop - start)
        lines = torch.nn.functional.pad(rows[row, start:stop], (0, padding)).view_as(signs)
        sums[row] += (lines * signs).gather(1, (columns - shifts) % width).sum(0)
    return sums


def _unsketch_in_batches(
    out: torch.Tensor,
    sketches: torch.Tensor,
    rotations: Draws,
    offsets: Draws,
    alpha: float,
    add: bool,
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
