"""Cut rows into blocks, and into pieces of many blocks that stay in the cache."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from comm_hooks.kernels.bits import packed_nbytes

# A piece of 2 MB is in the cache for all steps, and large enough for the calls, some 40 us, not to
# count.
PIECE = 1 << 19


@dataclass(frozen=True)
class Blocks:
    """The division of a row of ``numel`` elements into equal blocks of at most ``largest``.

    Equal blocks need no special case for a tail: a row is padded with at most ``count - 1`` zeros,
    and the size of a payload is a function of ``numel`` alone.
    """

    numel: int
    largest: int

    @property
    def count(self) -> int:
        return -(-self.numel // self.largest)

    @property
    def size(self) -> int:
        return -(-self.numel // self.count)

    def starts(self, device: torch.device) -> Tensor:
        """Return the index in the row of each block's first element, int64, (count,)."""
        return torch.arange(self.count, device=device) * self.size


def cut(rows: Tensor, size: int) -> Tensor:
    """Return rows (n, numel) as (n, blocks, size): a view, or a copy padded with zeros."""
    padding = -rows.shape[1] % size
    if padding:
        rows = torch.nn.functional.pad(rows, (0, padding))
    return rows.unflatten(1, (-1, size))


class Pieces:
    """Cuts rows (n, numel) into pieces: several rows, or some blocks of ``size`` of one row.

    A piece begins at a multiple of 8 blocks of a row, where codes of any width begin at a byte.
    """

    def __init__(self, n: int, numel: int, size: int) -> None:
        self._n = n
        self._numel = numel
        self._size = size
        self._width = min(numel, max(1, PIECE // (8 * size)) * 8 * size)
        self._height = min(n, max(1, PIECE // self._width))
        # The most elements of a piece.
        self.numel = self._height * self._width
        self._buffer = torch.empty(
            self._height * 8 * packed_nbytes(self._width, 1), dtype=torch.float32
        )

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

    def buffer(self, height: int, width: int) -> Tensor:
        """Return an uninitialized float32 tensor of this shape, over one buffer for all calls.

        The buffer is large enough for a piece with rows padded to a multiple of 8 elements.
        """
        return self._buffer[: height * width].view(height, width)


def packed(columns: slice, bits: int) -> slice:
    """Return the slice of a row's packed codes, ``bits`` bits per element, of these columns."""
    return slice(columns.start * bits // 8, packed_nbytes(columns.stop, bits))


def in_blocks(
    size: int, matrices: Sequence[Tensor], values: Sequence[Tensor]
) -> Iterator[list[Tensor]]:
    """Yield views of the full blocks of all matrices, then of the shorter last block, if any.

    Args:
        size: the number of elements of a block.
        matrices: (n, numel) each; viewed as (n, blocks, size).
        values: matrices of one value for each block, (n, count); viewed as (n, blocks, 1).
    """
    n, numel = matrices[0].shape
    full, rest = divmod(numel, size)
    for start, blocks, length in ((0, full, size), (full * size, min(1, rest), rest)):
        if blocks:
            columns, shape = slice(start, start + blocks * length), (n, blocks, length)
            first = start // size
            yield [
                *(matrix[:, columns].view(shape) for matrix in matrices),
                *(value[:, first : first + blocks].unsqueeze(2) for value in values),
            ]
