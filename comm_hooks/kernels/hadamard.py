"""The orthonormal Walsh-Hadamard transform."""

import functools
import math

import torch
from torch import Tensor

from comm_hooks.kernels.operators import always, operator


@operator(triton=always)
def hadamard(rows: Tensor) -> Tensor:
    """Return the orthonormal Walsh-Hadamard transform of each row; its own inverse.

    Args:
        rows: (n, 2^k), float32.

    Returns:
        A new contiguous tensor of the same shape.
    """
    # Sums and differences, k times.
    numel = rows.shape[1]
    result, half = rows, 1
    while half < numel:
        left, right = result.view(len(rows), -1, 2, half).unbind(2)
        result = torch.stack([left + right, left - right], dim=2).view(len(rows), numel)
        half *= 2
    return result / math.sqrt(numel)


@hadamard.fast(only_on_cpu=False)
def _hadamard_by_products(rows: Tensor) -> Tensor:
    """Multiply by the factors of H_{2^k}, a Kronecker product of matrices of order at most 64.

    Each factor acts on an axis of the row seen as an array, by a product without transposition.
    """
    numel = rows.shape[1]
    # Two buffers for all factors: new memory would take longer to touch than to compute.
    current = rows.clone(memory_format=torch.contiguous_format)
    other = torch.empty_like(current)
    stride = 1
    while stride < numel:
        order = min(64, numel // stride)
        factor = _matrix(order, rows.device)
        if stride == 1:
            torch.mm(current.view(-1, order), factor, out=other.view(-1, order))
        else:
            shape = (-1, order, stride)
            torch.matmul(factor, current.view(shape), out=other.view(shape))
        current, other = other, current
        stride *= order
    return current


@functools.lru_cache(maxsize=32)
def _matrix(order: int, device: torch.device) -> Tensor:
    """Return the orthonormal Hadamard matrix (order, order); the order is a power of two."""
    matrix = torch.ones(1, 1, dtype=torch.float32)
    while matrix.shape[0] < order:
        matrix = torch.kron(torch.tensor([[1.0, 1.0], [1.0, -1.0]], dtype=torch.float32), matrix)
    return (matrix / math.sqrt(order)).to(device)
