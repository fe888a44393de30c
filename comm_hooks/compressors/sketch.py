"""Linear sketches: b = ratio x d random projections of the vector, fresh every step.

All three follow SAFL (sk(v) = R v, desk(s) = R^T s, R in R^{b x d} the same on all ranks within a
round): ``compress`` is linear, so sketches are summed on the wire, and E[R^T R] = I, so the
decompressed mean is unbiased.  Do not use error feedback: the error of R^T R v is sqrt(d/b) times
``|v|``, and feedback would amplify it.  The noise averages out over steps, through the momentum.
"""

import math
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from comm_hooks.compressors.base import Compressor, write
from comm_hooks.kernels.count_sketch import sketch, unsketch
from comm_hooks.kernels.hadamard import hadamard
from comm_hooks.kernels.pieces import Blocks, cut
from comm_hooks.kernels.random_signs import multiply_signs_
from comm_hooks.randomness import Draw, Keys, fork, stratified_indices
from comm_hooks.requirements import require_positive, require_within
from comm_hooks.transfers import to_device


@dataclass(frozen=True)
class _Sketch(Compressor):
    """The base class of the three sketches: linear, unbiased, with float32 payloads.

    The default granularity is a bucket: a sketch spreads its noise evenly over its vector.  Layers
    with large gradients (embeddings) stand out of the noise of a bucket; with a sketch per layer
    noise is proportional to the layer's gradient, which no layer stands out of, and Adam's steps
    divide by the noise.
    """

    ratio: float = 0.02
    linear = True
    unbiased = True
    contractive = False
    granularity = "bucket"

    def __post_init__(self) -> None:
        require_within(self, "ratio", self.ratio, "(0, 1]")

    def width(self, numel: int) -> int:
        """Return b, the number of float32 values of a sketch of ``numel`` elements."""
        return max(1, round(self.ratio * numel))

    def payload_nbytes(self, numel: int, *, world_size: int = 1) -> int:
        return 4 * self.width(numel)

    def norm_bound(self, numel: int, *, world_size: int = 1) -> float:
        return math.sqrt(-(-numel // self.width(numel)))


@dataclass(frozen=True)
class CountSketch(_Sketch):
    """Count-Sketch with a structured hash: every element is added, with a sign, to one of b sums.

    Charikar, Chen & Farach-Colton, ICALP 2002; as an operator on gradients: SAFL, FetchSGD.
    Scattering single elements would run at the speed of random memory access.  Here

    1. the vector is cut into d/b rows of length b;
    2. each row is multiplied by random signs (a window of a fixed balanced table, read at an
       offset drawn for this row and step) and rotated by a random number of places;
    3. the rows are summed.

    Two elements of one row never meet, two elements of different rows meet with probability 1/b.
    Hence the relative mean squared error of ``decompress(compress(v))`` is d/b - 1, slightly below
    the (d - 1)/b of independent hashes; <R v, R h> has a Count-Sketch's variance for all v, h.

    Args:
        ratio: b/d, the size of the sketch relative to the vector, in (0, 1].

    Shapes: vector (d,) float32 -> payload (b,) float32, b = round(ratio x d), at least 1.
    Cost: one pass over the vector each way.
    Not supported: error feedback (not contractive).

    Example::

        >>> sketch = CountSketch(ratio=1 / 8)
        >>> payload = sketch.compress(torch.ones(1024), key=1)
        >>> payload.shape, sketch.decompress(payload, 1024, key=1).shape
        (torch.Size([128]), torch.Size([1024]))
    """

    def encode(self, rows: Tensor, draw: Draw) -> Tensor:
        return sketch(rows, self.width(rows.shape[1]), draw.keys)

    def decode(
        self, out: Tensor, payloads: Tensor, draw: Draw, *, alpha: float = 1.0, add: bool = False
    ) -> None:
        unsketch(out, payloads.view(torch.float32), draw.keys, alpha=alpha, add=add)


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

    def _samples(self, numel: int, keys: Keys, device: torch.device) -> tuple[Tensor, Tensor]:
        indices, sizes = stratified_indices(fork(keys, 0), numel, self.width(numel))
        scales = torch.from_numpy(np.sqrt(sizes).astype(np.float32))
        return to_device(torch.from_numpy(indices), device), to_device(scales, device)

    def encode(self, rows: Tensor, draw: Draw) -> Tensor:
        numel = rows.shape[1]
        coefficients = multiply_signs_(rows.clone(), fork(draw.keys, 1))
        head = 1 << (numel.bit_length() - 1)
        coefficients[:, :head] = hadamard(coefficients[:, :head])
        if head < numel:
            coefficients[:, -head:] = hadamard(coefficients[:, -head:])
        indices, scales = self._samples(numel, draw.keys, rows.device)
        return coefficients.gather(1, indices).mul_(scales)

    def decode(
        self, out: Tensor, payloads: Tensor, draw: Draw, *, alpha: float = 1.0, add: bool = False
    ) -> None:
        numel = out.shape[1]
        indices, scales = self._samples(numel, draw.keys, out.device)
        coefficients = torch.zeros_like(out)
        coefficients.scatter_(1, indices, payloads.view(torch.float32) * scales)
        head = 1 << (numel.bit_length() - 1)
        if head < numel:
            coefficients[:, -head:] = hadamard(coefficients[:, -head:])
        coefficients[:, :head] = hadamard(coefficients[:, :head])
        write(out, multiply_signs_(coefficients, fork(draw.keys, 1)), alpha, add)


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
        block_size: the elements per block; in larger ones the error varies less, at more cost.

    Shapes: vector (d,) float32 -> payload (b,) float32.
    Not supported: error feedback (not contractive); ranks of different device types (the matrix
    comes from the device's own generator).

    Example::

        >>> GaussianSketch(ratio=0.25).compress(torch.ones(64), key=2).shape
        torch.Size([16])
    """

    block_size: int = 4096

    def __post_init__(self) -> None:
        super().__post_init__()
        require_positive(self, "block_size", self.block_size)

    def width(self, numel: int) -> int:
        blocks = Blocks(numel, self.block_size)
        return blocks.count * super().width(blocks.size)

    def norm_bound(self, numel: int, *, world_size: int = 1) -> float:
        return math.inf

    def _matrix(self, size: int, key: int, device: torch.device) -> Tensor:
        width = _Sketch.width(self, size)
        generator = torch.Generator(device).manual_seed(key)
        return torch.randn(
            size, width, device=device, generator=generator, dtype=torch.float32
        ).div_(math.sqrt(width))

    def encode(self, rows: Tensor, draw: Draw) -> Tensor:
        blocks = Blocks(rows.shape[1], self.block_size)
        signed = cut(multiply_signs_(rows.clone(), fork(draw.keys, 1)), blocks.size)
        return torch.stack(
            [
                (vectors @ self._matrix(blocks.size, key, rows.device)).flatten()
                for vectors, key in zip(signed, map(int, draw.keys), strict=True)
            ]
        )

    def decode(
        self, out: Tensor, payloads: Tensor, draw: Draw, *, alpha: float = 1.0, add: bool = False
    ) -> None:
        blocks = Blocks(out.shape[1], self.block_size)
        sketches = payloads.view(torch.float32).reshape(len(out), blocks.count, -1)
        vectors = torch.stack(
            [
                sketch @ self._matrix(blocks.size, key, out.device).T
                for sketch, key in zip(sketches, map(int, draw.keys), strict=True)
            ]
        )
        signed = vectors.flatten(1)[:, : out.shape[1]].contiguous()
        write(out, multiply_signs_(signed, fork(draw.keys, 1)), alpha, add)
