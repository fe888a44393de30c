"""DCTTopK against SciPy."""

import math

import numpy as np
import pytest
import scipy.fft
import torch

from comm_hooks import DCTTopK, TopK
from comm_hooks.compressors.dct import dct_matrix

CPU = torch.device("cpu")


def through(compressor: DCTTopK | TopK, vector: torch.Tensor) -> torch.Tensor:
    return compressor.decompress(compressor.compress(vector, key=0), vector.numel(), key=0)


def reference(vector: np.ndarray, chunk: int, density: float) -> np.ndarray:
    """The docstring's algorithm in float64: every chunk alone, by SciPy's transforms."""
    side = min(chunk, math.ceil(math.sqrt(vector.size)))
    pieces = []
    for start in range(0, vector.size, side**2):
        piece = np.zeros(side**2)
        own = vector[start : start + side**2]
        piece[: own.size] = own
        coefficients = scipy.fft.dctn(piece.reshape(side, side), norm="ortho").ravel()
        dropped = np.argsort(-np.abs(coefficients))[math.ceil(density * side**2) :]
        coefficients[dropped] = 0
        back = scipy.fft.idctn(coefficients.reshape(side, side), norm="ortho").ravel()
        pieces.append(back[: own.size])
    return np.concatenate(pieces)


@pytest.mark.parametrize("order", [1, 2, 3, 8, 63, 64, 256])
def test_the_matrix_is_scipys_transform_and_orthonormal(order: int) -> None:
    matrix = dct_matrix(order, CPU)
    expected = scipy.fft.dct(np.eye(order), axis=0, norm="ortho")
    np.testing.assert_allclose(matrix.numpy(), expected, atol=1e-7)
    torch.testing.assert_close(matrix @ matrix.T, torch.eye(order), atol=1e-6, rtol=0)


@pytest.mark.parametrize("density", [1 / 128, 0.1, 1.0])
@pytest.mark.parametrize("numel", [1, 2, 5, 64, 65, 1000, 4097])
@pytest.mark.parametrize("chunk", [1, 8, 64])
def test_matches_the_reference(numel: int, chunk: int, density: float) -> None:
    vector = np.random.default_rng(numel).normal(size=numel)
    decoded = through(DCTTopK(chunk, density, 32), torch.from_numpy(vector))
    np.testing.assert_allclose(decoded.numpy(), reference(vector, chunk, density), atol=2e-6)


def test_where_neighbours_move_together_it_beats_topk_at_equal_size() -> None:
    steps = torch.randn(16, 4096, generator=torch.Generator().manual_seed(0))
    smooth = (steps.cumsum(1) / 64).flatten()
    dct, topk = DCTTopK(density=1 / 128), TopK(density=1 / 128)
    assert dct.payload_nbytes(smooth.numel()) == topk.payload_nbytes(smooth.numel())
    errors = [(through(c, smooth) - smooth).norm() for c in (dct, topk)]
    assert errors[0] < 0.3 * errors[1]


def test_bytes_of_a_chunk() -> None:
    """32 of 4096: 9 bits of index and 16 of value each; an element more is another chunk."""
    assert DCTTopK().payload_nbytes(4096) == 32 * (9 + 16) // 8
    assert DCTTopK().payload_nbytes(4097) == 2 * DCTTopK().payload_nbytes(4096)
