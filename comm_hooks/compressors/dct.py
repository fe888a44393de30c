"""The compressor of DeMo: top-k of the coefficients of a cosine transform."""

import functools
import math
from dataclasses import dataclass

import torch
from torch import Tensor

from comm_hooks.compressors.base import Compressor, write
from comm_hooks.compressors.sparse import MAX_BLOCK_SIZE, TopK, require_selection
from comm_hooks.kernels.pieces import cut
from comm_hooks.randomness import Draw
from comm_hooks.requirements import require_positive

MAX_CHUNK = math.isqrt(MAX_BLOCK_SIZE)


@dataclass(frozen=True)
class DCTTopK(Compressor):
    """The largest coefficients of the discrete cosine transform of every chunk of the vector.

    DeMo (Peng, Quesnelle & Kingma, 2024, section 3): where neighbours move together, a few
    coefficients describe many elements.

    1. cut the vector into chunks of chunk x chunk consecutive elements, the last one padded with
       zeros, and see each as a square X;
    2. Y = D X D^T with the orthonormal DCT-II, D[k, j] = sqrt(2 / chunk) cos(pi (2 j + 1) k /
       (2 chunk)), and D[0, j] = 1 / sqrt(chunk);
    3. send the fraction ``density`` of each Y, largest in magnitude, by :class:`~comm_hooks.TopK`;
    4. decode by D^T Y D, and drop the padding.

    A vector of fewer than chunk^2 elements is one smaller chunk: the smallest square that holds it.

    Differences to the authors' code: a chunk is a piece of the flattened parameter, not a rectangle
    of its two axes (the same thing where a matrix has ``chunk`` columns), because a compressor sees
    vectors, and shards of vectors; the mean of a coefficient is over all ranks, but under
    :class:`~comm_hooks.optim.DeMo` over those that sent it, as theirs; an index takes 2 +
    log2(1/density) bits rather than 64.  Momentum, decay and the update's sign are the optimizer's.

    Args:
        chunk: the side of a chunk, 1 to 256.
        density: the kept fraction of coefficients, in (0, 1]; DeMo's 32 of 64 x 64 are 1/128.
        value_bits: 1, 2, 3, 4, 16 or 32, as in :class:`~comm_hooks.TopK`.

    Shapes: vector (d,) -> payload uint8.
    Cost: 2 chunk multiplications per element each way, in matrix products, in addition to TopK.
    Use with :class:`~comm_hooks.memory.ErrorFeedback`: without it other coefficients are lost.
    Not supported: summing payloads (each rank sends other coefficients).

    Example::

        >>> dct = DCTTopK(density=1 / 4096, value_bits=32)
        >>> payload = dct.compress(torch.full((4096,), 3.0), key=0)
        >>> payload.nbytes, dct.decompress(payload, 4096, key=0).mean()
        (8, tensor(3.))
    """

    chunk: int = 64
    density: float = 1 / 128
    value_bits: int = 16

    def __post_init__(self) -> None:
        require_positive(self, "chunk", self.chunk)
        if self.chunk > MAX_CHUNK:
            raise ValueError(f"DCTTopK: chunk must be at most {MAX_CHUNK}, got {self.chunk}")
        require_selection(self, self.density, self.chunk**2, self.value_bits)

    unbiased = False
    contractive = True

    def _plan(self, numel: int) -> tuple[int, int, TopK]:
        """Return the side of a chunk, the padded length of a vector, and the top-k compressor."""
        side = min(self.chunk, math.isqrt(numel - 1) + 1)
        padded = -(-numel // side**2) * side**2
        return side, padded, TopK(self.density, side**2, self.value_bits)

    def payload_nbytes(self, numel: int, *, world_size: int = 1) -> int:
        _, padded, top_k = self._plan(numel)
        return top_k.payload_nbytes(padded)

    def encode(self, rows: Tensor, draw: Draw) -> Tensor:
        side, padded, top_k = self._plan(rows.shape[1])
        matrix = dct_matrix(side, rows.device)
        squares = cut(rows, side**2).reshape(-1, side, side)
        coefficients = matrix @ squares @ matrix.T
        return top_k.encode(coefficients.view(-1, padded), draw)

    def decode(
        self, out: Tensor, payloads: Tensor, draw: Draw, *, alpha: float = 1.0, add: bool = False
    ) -> None:
        self.write_vectors(out, self.coefficients(payloads, out.shape[1], draw), alpha, add)

    def coefficients(self, payloads: Tensor, numel: int, draw: Draw) -> Tensor:
        """Return the DCT coefficients (n, padded) in payloads (n, nbytes), zero where not sent."""
        _, padded, top_k = self._plan(numel)
        coefficients = torch.empty(
            len(payloads), padded, device=payloads.device, dtype=torch.float32
        )
        top_k.decode(coefficients, payloads, draw)
        return coefficients

    def write_vectors(self, out: Tensor, coefficients: Tensor, alpha: float, add: bool) -> None:
        """Write ``alpha`` times the inverse DCT of the coefficients to ``out``, or add it."""
        numel = out.shape[1]
        side, padded, _ = self._plan(numel)
        matrix = dct_matrix(side, out.device)
        chunks = matrix.T @ coefficients.view(-1, side, side) @ matrix
        write(out, chunks.view(-1, padded)[:, :numel], alpha, add)


@functools.lru_cache(maxsize=32)
def dct_matrix(order: int, device: torch.device) -> Tensor:
    """Return the orthonormal DCT-II, float32: ``dct_matrix(n, device) @ x`` transforms x (n, m)."""
    index = torch.arange(order, dtype=torch.float64)
    matrix = torch.cos(math.pi / order * torch.outer(index, index + 0.5)) * math.sqrt(2 / order)
    matrix[0] = 1 / math.sqrt(order)
    return matrix.float().to(device)
