"""Vectors that kernels must cope with, drawn by hypothesis."""

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
from hypothesis import strategies as st

from comm_hooks.kernels import pieces

# Few different values, so that magnitudes tie; zeros of both signs and the smallest of all.
TYING = torch.tensor([0.0, -0.0, 1.0, -1.0, 2.0, -2.0, 1e-45, -1e-45])


@st.composite
def matrices(
    draw: st.DrawFn, rows: st.SearchStrategy[int], numels: st.SearchStrategy[int]
) -> torch.Tensor:
    """A float32 matrix (rows, numel): Gaussian, full of ties, all equal or zero; perhaps strided.

    Some of its rows may be zero.
    """
    shape = (draw(rows), 2 * draw(numels))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**32)))
    kind = draw(st.sampled_from(["gaussian", "ties", "equal", "zero"]))
    if kind == "gaussian":
        matrix = torch.randn(shape, generator=generator)
    elif kind == "ties":
        matrix = TYING[torch.randint(len(TYING), shape, generator=generator)]
    else:
        matrix = torch.full(shape, -3.5 if kind == "equal" else 0.0)
    matrix *= torch.rand(shape[0], 1, generator=generator) < draw(st.sampled_from([0.5, 2.0]))
    if draw(st.booleans()):
        return matrix[:, ::2]
    return matrix[:, : shape[1] // 2].contiguous()


vectors = matrices(
    st.integers(1, 4),
    st.one_of(st.integers(1, 70), st.sampled_from([1000, 4096, 5001, 9000])),
)
sizes = st.one_of(st.integers(1, 80), st.sampled_from([256, 4096]))
piece_sizes = st.sampled_from([1, 100, 5000, pieces.PIECE])


@contextmanager
def cut_into(piece: int) -> Iterator[None]:
    """Let kernels work on pieces of so many elements."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pieces, "PIECE", piece)
        yield
