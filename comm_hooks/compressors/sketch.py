"""Linear sketches: b = ratio x d random projections of the vector, fresh every step.

All three follow SAFL (sk(v) = R v, desk(s) = R^T s, R in R^{b x d} the same on all ranks within a
round): ``compress`` is linear, so sketches are summed on the wire, and E[R^T R] = I, so the
decompressed mean is unbiased.  No error feedback belongs to them: R^T R v is off by sqrt(d/b) times
``|v|``, which feedback would amplify.  The noise averages out over steps, through the momentum.
"""

import functools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from comm_hooks.compressors.base import (
    Blocks,
    Compressor,
    require_fraction,
    require_positive,
    write,
)
from comm_hooks.randomness import (
    SIGN_TABLE_SIZE,
    SIGN_WINDOW,
    fork,
    multiply_signs_,
    random_below,
    sign_offsets,
    sign_table,
    stratified_indices,
)

# Below this width a Count-Sketch takes many rows at once, about _BATCH elements.
_NARROW = 512
_BATCH = 1 << 16


class _Sketch(Compressor):
    """What the three sketches share: a ratio, float32 payloads, linearity, no bias."""

    ratio: float
    linear = True
    unbiased = True
    contractive = False

    def width(self, numel: int) -> int:
        """Return b, the number of float32 values that stand for ``numel`` elements."""
        return max(1, round(self.ratio * numel))

    def payload_nbytes(self, numel: int, *, world_size: int = 1) -> int:
        return 4 * self.width(numel)


@dataclass(frozen=True)
class CountSketch(_Sketch):
    """Count-Sketch with a structured hash: every element is added, with a sign, to one of b sums.

    Charikar, Chen & Farach-Colton, ICALP 2002; as an operator on gradients: SAFL, FetchSGD.
    A hash that scatters single elements runs at the speed of random memory access.  Here

    1. the vector is cut into d/b rows of length b;
    2. each row is multiplied by random signs (a window of a fixed balanced table, read at an
       offset drawn for this row and step) and rotated by a random number of places;
    3. the rows are summed.

    Two elements of one row never meet, two elements of different rows meet with probability 1/b.
    Hence the relative mean squared error of ``decompress(compress(v))`` is d/b - 1, slightly below
    the (d - 1)/b of independent hashes, and <R v, R h> has the variance of a Count-Sketch.

    Args:
        ratio: b/d, the fraction of the bytes that is sent, in (0, 1].

    Shapes: vector (d,) float32 -> payload (b,) float32, b = round(ratio x d), at least 1.
    Cost: one pass over the vector each way.
    Not supported: error feedback (not contractive).

    Example::

        >>> sketch = CountSketch(ratio=1 / 8)
        >>> payload = sketch.compress(torch.ones(1024), key=1)
        >>> payload.shape, sketch.decompress(payload, 1024, key=1).shape
        (torch.Size([128]), torch.Size([1024]))
    """

    ratio: float = 0.02

    def __post_init__(self) -> None:
        require_fraction(self, "ratio", self.ratio)

    def norm_bound(self, numel: int, *, world_size: int = 1) -> float:
        return math.sqrt(-(-numel // self.width(numel)))

    def _pieces(
        self, numel: int, keys: Sequence[int]
    ) -> Iterator[Iterator[tuple[int, int, int, int]]]:
        """Yield, per key, (start, stop, first sum, sign offset) of every contiguous piece."""
        width = self.width(numel)
        windows = -(-width // SIGN_WINDOW)
        count = -(-numel // width)
        rotations = random_below(fork(keys, 0), count, width).tolist()
        offsets = sign_offsets(fork(keys, 1), count * windows)
        for row_rotations, row_offsets in zip(rotations, offsets, strict=True):
            yield (
                (
                    start,
                    min(start + SIGN_WINDOW, row * width + width, numel),
                    rotation + start - row * width,
                    row_offsets[row * windows + window],
                )
                for row, rotation in enumerate(row_rotations)
                for window, start in enumerate(
                    range(row * width, min(row * width + width, numel), SIGN_WINDOW)
                )
            )

    def _batches(
        self, numel: int, keys: Sequence[int], device: torch.device
    ) -> Iterator[Iterator[tuple[int, int, torch.Tensor, torch.Tensor]]]:
        """Yield, per key, (start, stop, rotations, signs) of batches of whole rows.

        For sketches so narrow that rows one by one take longer to ask for than to compute.
        Rotations have the shape (rows, 1), signs (rows, width); the last batch may be padded.
        """
        width = self.width(numel)
        count = -(-numel // width)
        rotations, offsets = (
            torch.from_numpy(random_below(fork(keys, stream), count, bound)).to(device)
            for stream, bound in enumerate((width, SIGN_TABLE_SIZE))
        )
        columns = torch.arange(width, device=device)
        step = max(1, _BATCH // width)
        for row_rotations, row_offsets in zip(rotations, offsets, strict=True):
            yield (
                (
                    first * width,
                    min((first + step) * width, numel),
                    row_rotations[first : first + step, None],
                    sign_table(device)[row_offsets[first : first + step, None] + columns],
                )
                for first in range(0, count, step)
            )

    def _compress_narrow(self, rows: torch.Tensor, keys: Sequence[int]) -> torch.Tensor:
        width = self.width(rows.shape[1])
        columns = torch.arange(width, device=rows.device)
        sums = torch.zeros(len(keys), width, device=rows.device)
        for row, total, batches in zip(
            rows, sums, self._batches(rows.shape[1], keys, rows.device), strict=True
        ):
            for start, stop, rotations, signs in batches:
                padding = signs.numel() - (stop - start)
                lines = torch.nn.functional.pad(row[start:stop], (0, padding)).view_as(signs)
                total += (lines * signs).gather(1, (columns - rotations) % width).sum(0)
        return sums

    def _decode_narrow(
        self, out: torch.Tensor, sketch: torch.Tensor, keys: Sequence[int], add: bool
    ) -> None:
        width = sketch.shape[1]
        columns = torch.arange(width, device=out.device)
        for row, total, batches in zip(
            out, sketch, self._batches(out.shape[1], keys, out.device), strict=True
        ):
            for start, stop, rotations, signs in batches:
                values = total[(columns + rotations) % width].mul_(signs)
                write(row[start:stop], values.flatten()[: stop - start], 1.0, add)

    def _compress(
        self, rows: torch.Tensor, keys: Sequence[int], rank: int, world_size: int
    ) -> torch.Tensor:
        numel = rows.shape[1]
        width = self.width(numel)
        if width < _NARROW:
            return self._compress_narrow(rows, keys)
        signs = sign_table(rows.device)
        # Twice the width: a rotated piece stays contiguous, and the halves are added at the end.
        sums = torch.zeros(len(keys), 2 * width, device=rows.device)
        for row, total, pieces in zip(rows, sums, self._pieces(numel, keys), strict=True):
            for start, stop, place, offset in pieces:
                length = stop - start
                total[place : place + length].addcmul_(
                    row[start:stop], signs[offset : offset + length]
                )
        return sums[:, :width] + sums[:, width:]

    def _decode(
        self,
        out: torch.Tensor,
        payloads: torch.Tensor,
        keys: Sequence[int],
        rank: int,
        world_size: int,
        alpha: float,
        add: bool,
    ) -> None:
        numel = out.shape[1]
        signs = sign_table(out.device)
        sketch = payloads.view(torch.float32) * alpha
        if sketch.shape[1] < _NARROW:
            self._decode_narrow(out, sketch, keys, add)
            return
        sketch = torch.cat([sketch, sketch], dim=1)
        for row, total, pieces in zip(out, sketch, self._pieces(numel, keys), strict=True):
            for start, stop, place, offset in pieces:
                length = stop - start
                values, flips = total[place : place + length], signs[offset : offset + length]
                if add:
                    row[start:stop].addcmul_(values, flips)
                else:
                    torch.mul(values, flips, out=row[start:stop])


@dataclass(frozen=True)
class SRHT(_Sketch):
    """Subsampled randomized Hadamard transform: R = sqrt(d/b) S H D.

    Ailon & Chazelle, STOC 2006; Tropp, 2011; in SAFL the sketch of least variance.

    1. D: multiply by random signs;
    2. H: an orthonormal Hadamard transform.  For d = 2^k it is the Hadamard matrix; otherwise one
       of the largest fitting power of two is applied to the head and then to the tail of the
       vector, which overlap: orthonormal for every d, without padding;
    3. S: keep b of the d coefficients, one drawn from each of b equal strata.

    The relative mean squared error is d/b - 1 for every vector; with ratio = 1 it is lossless.

    Args:
        ratio: b/d, in (0, 1].

    Shapes: vector (d,) float32 -> payload (b,) float32.
    Cost: log64(d) small matrix products over the vector each way.
    Not supported: error feedback (not contractive).

    Example::

        >>> sketch, vector = SRHT(ratio=1.0), torch.arange(5.0)
        >>> payload = sketch.compress(vector, key=3)
        >>> torch.allclose(sketch.decompress(payload, 5, key=3), vector, atol=1e-5)
        True
    """

    ratio: float = 0.02

    def __post_init__(self) -> None:
        require_fraction(self, "ratio", self.ratio)

    def norm_bound(self, numel: int, *, world_size: int = 1) -> float:
        return math.sqrt(-(-numel // self.width(numel)))

    def _samples(
        self, numel: int, keys: Sequence[int], device: torch.device
    ) -> tuple[torch.Tensor, torch.Tensor]:
        indices, sizes = stratified_indices(fork(keys, 0), numel, self.width(numel))
        scales = torch.from_numpy(np.sqrt(sizes).astype(np.float32))
        return torch.from_numpy(indices).to(device), scales.to(device)

    def _compress(
        self, rows: torch.Tensor, keys: Sequence[int], rank: int, world_size: int
    ) -> torch.Tensor:
        numel = rows.shape[1]
        coefficients = multiply_signs_(rows.clone(), fork(keys, 1))
        head = 1 << (numel.bit_length() - 1)
        coefficients[:, :head] = hadamard(coefficients[:, :head])
        if head < numel:
            coefficients[:, -head:] = hadamard(coefficients[:, -head:])
        indices, scales = self._samples(numel, keys, rows.device)
        return coefficients.gather(1, indices).mul_(scales)

    def _decode(
        self,
        out: torch.Tensor,
        payloads: torch.Tensor,
        keys: Sequence[int],
        rank: int,
        world_size: int,
        alpha: float,
        add: bool,
    ) -> None:
        numel = out.shape[1]
        indices, scales = self._samples(numel, keys, out.device)
        coefficients = torch.zeros_like(out)
        coefficients.scatter_(1, indices, payloads.view(torch.float32) * scales)
        head = 1 << (numel.bit_length() - 1)
        if head < numel:
            coefficients[:, -head:] = hadamard(coefficients[:, -head:])
        coefficients[:, :head] = hadamard(coefficients[:, :head])
        write(out, multiply_signs_(coefficients, fork(keys, 1)), alpha, add)


@dataclass(frozen=True)
class GaussianSketch(_Sketch):
    """Dense Gaussian sketch: R has independent N(0, 1/b) entries.

    The reference among the sketches (SAFL's analysis), not the fast one: a dense R costs O(b d).
    Here the vector is cut into blocks of at most ``block_size`` elements that share one Gaussian
    matrix per parameter and step, each block behind random signs of its own, so that the blocks'
    errors do not add up.  That costs O(ratio x block_size) operations per element, which is still
    tens to hundreds of times a Count-Sketch: use it for studies.

    The relative mean squared error is (c + 1)/b_c for blocks of c elements and b_c = ratio x c.

    Args:
        ratio: b/d, in (0, 1].
        block_size: elements per block; larger blocks concentrate better and cost more.

    Shapes: vector (d,) float32 -> payload (b,) float32.
    Not supported: error feedback (not contractive); ranks of different device types (the matrix
    comes from the device's own generator).

    Example::

        >>> GaussianSketch(ratio=0.25).compress(torch.ones(64), key=2).shape
        torch.Size([16])
    """

    ratio: float = 0.02
    block_size: int = 4096

    def __post_init__(self) -> None:
        require_fraction(self, "ratio", self.ratio)
        require_positive(self, "block_size", self.block_size)

    def width(self, numel: int) -> int:
        blocks = Blocks(numel, self.block_size)
        return blocks.count * super().width(blocks.size)

    def _matrix(self, size: int, key: int, device: torch.device) -> torch.Tensor:
        width = _Sketch.width(self, size)
        generator = torch.Generator(device).manual_seed(key)
        return torch.randn(size, width, device=device, generator=generator).div_(math.sqrt(width))

    def _compress(
        self, rows: torch.Tensor, keys: Sequence[int], rank: int, world_size: int
    ) -> torch.Tensor:
        blocks = Blocks(rows.shape[1], self.block_size)
        signed = blocks.split(multiply_signs_(rows.clone(), fork(keys, 1)))
        return torch.stack(
            [
                (vectors @ self._matrix(blocks.size, key, rows.device)).flatten()
                for vectors, key in zip(signed, keys, strict=True)
            ]
        )

    def _decode(
        self,
        out: torch.Tensor,
        payloads: torch.Tensor,
        keys: Sequence[int],
        rank: int,
        world_size: int,
        alpha: float,
        add: bool,
    ) -> None:
        blocks = Blocks(out.shape[1], self.block_size)
        sketches = payloads.view(torch.float32).reshape(len(keys), blocks.count, -1)
        vectors = torch.stack(
            [
                sketch @ self._matrix(blocks.size, key, out.device).T
                for sketch, key in zip(sketches, keys, strict=True)
            ]
        )
        signed = blocks.join(vectors).contiguous()
        write(out, multiply_signs_(signed, fork(keys, 1)), alpha, add)


@functools.lru_cache(maxsize=32)
def _hadamard_matrix(order: int, device: torch.device) -> torch.Tensor:
    """Return the orthonormal Hadamard matrix of an order that is a power of two."""
    matrix = torch.ones(1, 1)
    while matrix.shape[0] < order:
        matrix = torch.kron(torch.tensor([[1.0, 1.0], [1.0, -1.0]]), matrix)
    return (matrix / math.sqrt(order)).to(device)


def hadamard(rows: torch.Tensor) -> torch.Tensor:
    """Return the orthonormal Walsh-Hadamard transform of each row (n, 2^k); its own inverse.

    H_{2^k} is a Kronecker product of Hadamard matrices of order at most 64.  Each factor acts on
    one axis of the row seen as an array, which is a matrix product that needs no transposition.
    """
    numel = rows.shape[1]
    # Two buffers for all factors: new memory would take longer to touch than to compute.
    current = rows.clone(memory_format=torch.contiguous_format)
    other = torch.empty_like(current)
    stride = 1
    while stride < numel:
        order = min(64, numel // stride)
        factor = _hadamard_matrix(order, rows.device)
        if stride == 1:
            torch.mm(current.view(-1, order), factor, out=other.view(-1, order))
        else:
            shape = (-1, order, stride)
            torch.matmul(factor, current.view(shape), out=other.view(shape))
        current, other = other, current
        stride *= order
    return current
