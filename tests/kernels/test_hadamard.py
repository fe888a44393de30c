"""The Walsh-Hadamard transform is what its definition says, and its own inverse."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from comm_hooks.kernels.hadamard import hadamard


@given(bits=st.integers(0, 13), rows=st.integers(1, 3), seed=st.integers(0, 2**32))
def test_equals_the_reference(bits: int, rows: int, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    matrix = torch.randn(rows, 2 << bits, generator=generator)[:, ::2]
    before = matrix.clone()
    transformed = hadamard(matrix)
    # Thousands of terms are added in another order.
    torch.testing.assert_close(transformed, hadamard.reference(matrix), atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(hadamard(transformed), matrix, atol=1e-4, rtol=1e-4)
    assert torch.equal(matrix, before)


@pytest.mark.parametrize("order", [1, 2, 8, 128])
def test_the_matrix_is_that_of_sylvester(order: int) -> None:
    """Entry (i, j) is -1 to the number of ones that i and j have in common, over sqrt(order)."""
    signs = [[(-1.0) ** bin(i & j).count("1") for j in range(order)] for i in range(order)]
    expected = torch.tensor(signs) / order**0.5
    torch.testing.assert_close(hadamard(torch.eye(order)), expected)
    torch.testing.assert_close(hadamard.reference(torch.eye(order)), expected)
