"""How matrices are cut for loops that stay in the cache."""

from collections.abc import Iterator

import torch

from comm_hooks.wire.bits import packed_nbytes

# A piece of 2 MB is in the cache for all steps, and large enough for the calls, some 40 us, not to
# count.
PIECE = 1 << 19


class Pieces:
    """Cuts rows (n, numel) of blocks of ``size`` into pieces: some rows, or some blocks of one row.

    A piece begins at the start of a row or a multiple of 8 blocks behind it: codes of any number of
    bits begin at a whole byte there.

    Example::

        >>> [(columns.stop, blocks.stop) for _, columns, blocks in Pieces(1, 20, 8)]
        [(20, 3)]
    """

    def __init__(self, n: int, numel: int, size: int) -> None:
        self._n = n
        self._numel = numel
        self._size = size
        self._width = min(numel, max(1, PIECE // (8 * size)) * 8 * size)
        self._height = min(n, max(1, PIECE // self._width))
        # The most elements of a piece.
        self.numel = self._height * self._width
        self._buffer = torch.empty(self._height * 8 * packed_nbytes(self._width, 1))

    def __iter__(self) -> Iterator[tuple[slice, slice, slice]]:
        """Yield each piece as slices of the rows, the columns and the blocks."""
        for top in range(0, self._n, self._height):
            for left in range(0, self._numel, self._width):
                right = min(left + self._width, self._numel)
                yield (
                    slice(top, min(top + self._height, self._n)),
                    slice(left, right),
                    slice(left // self._size, -(-right // self._size)),
                )

    def buffer(self, height: int, width: int) -> torch.Tensor:
        """Return uninitialized float32 memory of this shape, the same at every call.

        There is enough for a piece, and for one whose rows are a multiple of 8 elements long.
        """
        return self._buffer[: height * width].view(height, width)


def packed(columns: slice, bits: int) -> slice:
    """Return which bytes hold the codes of a piece, of ``bits`` bits each."""
    return slice(columns.start * bits // 8, packed_nbytes(columns.stop, bits))


def chunks(matrix: torch.Tensor, size: int) -> list[torch.Tensor]:
    """Return views (n, blocks, size) of the full blocks of a matrix and of a shorter last one.

    Example::

        >>> [chunk.shape for chunk in chunks(torch.ones(3, 20), 8)]
        [torch.Size([3, 2, 8]), torch.Size([3, 1, 4])]
    """
    n, numel = matrix.shape
    full = numel // size
    views = [matrix[:, : full * size].view(n, full, size)] if full else []
    return [*views, matrix[:, None, full * size :]] if full * size < numel else views


def per_chunk(values: torch.Tensor, numel: int, size: int) -> list[torch.Tensor]:
    """Return views (n, blocks) of one value per block, as :func:`chunks` has the blocks."""
    full = numel // size
    if full in (0, values.shape[1]):
        return [values]
    return [values[:, :full], values[:, full:]]
