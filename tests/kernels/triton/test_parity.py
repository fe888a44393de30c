"""The kernels compute what their references do: in Triton's interpreter, and on a GPU."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.kernels.vectors import matrices

pytestmark = pytest.mark.filterwarnings("ignore:.*function-scoped fixture")

Check = Callable[..., None]

few = settings(max_examples=4)
sizes = st.one_of(st.integers(1, 40), st.sampled_from([63, 64, 65, 100]))
counts_of_rows = st.integers(1, 3)
scales = st.sampled_from([1.0, -1.0, 0.5, 1 / 3])


def drawn(data: st.DataObject, rows: int, numel: int) -> np.ndarray[Any, Any]:
    matrix = data.draw(matrices(st.just(rows), st.just(numel)))
    return np.ascontiguousarray(matrix.numpy())


@pytest.mark.slow
@few
@given(data=st.data(), size=sizes, rows=counts_of_rows)
def test_top_k(interpreted: Check, data: st.DataObject, size: int, rows: int) -> None:
    """Full blocks and tails; few and all of a block; ties, of which the first are taken."""
    matrix = drawn(data, rows, data.draw(st.integers(1, 3 * size)))
    count = data.draw(st.one_of(st.sampled_from([1, size]), st.integers(1, size)))
    interpreted("check_top_k", matrix, size, count)


@pytest.mark.slow
def test_top_k_of_a_large_block(interpreted: Check) -> None:
    generator = np.random.default_rng(0)
    matrix = generator.standard_normal((2, 6000)).astype(np.float32)
    matrix[1, ::2] = 0
    interpreted("check_top_k", matrix, 4096, 64)


def test_top_k_of_what_differs_in_the_last_bit(interpreted: Check) -> None:
    generator = np.random.default_rng(0)
    steps = generator.permutation(200).astype(np.float32)
    interpreted("check_top_k", (1 + steps * np.float32(2**-23))[None], 100, 30)


def test_top_k_of_what_is_not_finite(interpreted: Check) -> None:
    """NaN is larger than infinity, which is larger than all others; both signs of each."""
    matrix = np.array([[1, np.inf, 3e38, -np.inf, np.nan, 2, 0, -0.0, np.nan]], np.float32)
    for count in range(1, 10):
        interpreted("check_top_k", matrix, 9, count)


@few
@given(data=st.data(), size=sizes, rows=counts_of_rows, bits=st.sampled_from([16, 32]))
def test_what_adds_a_residual_first(
    interpreted: Check, data: st.DataObject, size: int, rows: int, bits: int
) -> None:
    numel = data.draw(st.integers(1, 3 * size))
    matrix, vectors = drawn(data, rows, numel), drawn(data, rows, numel)
    # Powers of two: torch may round a product and a sum in one go.
    powers = st.sampled_from([1.0, 0.0, -0.5, 1024.0])
    factors = np.array([data.draw(powers) for _ in range(rows)], np.float32)
    count = data.draw(st.integers(1, size))
    interpreted("check_residual", matrix, vectors, factors, size, count, bits)


@few
@given(data=st.data(), size=sizes, rows=counts_of_rows, world=st.integers(1, 4), alpha=scales)
def test_sum_of_sparse_vectors(
    interpreted: Check, data: st.DataObject, size: int, rows: int, world: int, alpha: float
) -> None:
    numel = data.draw(st.integers(1, 3 * size))
    ranks = [drawn(data, rows, numel) for _ in range(world)]
    count = data.draw(st.integers(1, size))
    interpreted("check_scatter_sum", ranks, size, count, alpha, drawn(data, rows, numel))


@few
@given(data=st.data(), size=st.sampled_from([8, 16, 24, 64, 104, 4096]), rows=counts_of_rows)
def test_encode_signs(interpreted: Check, data: st.DataObject, size: int, rows: int) -> None:
    interpreted("check_encode_signs", drawn(data, rows, data.draw(st.integers(1, 300))), size)


def test_encode_signs_of_what_is_not_finite(interpreted: Check) -> None:
    matrix = np.array([[np.nan, 1, -1, 0, -0.0, np.inf, -np.inf, 2, 3, -4, 5]], np.float32)
    interpreted("check_encode_signs", matrix, 8)


@few
@given(data=st.data(), size=sizes, rows=counts_of_rows, world=st.integers(1, 4), alpha=scales)
def test_sum_of_signs(
    interpreted: Check, data: st.DataObject, size: int, rows: int, world: int, alpha: float
) -> None:
    """Blocks that begin and end within a byte of signs, too."""
    numel = data.draw(st.integers(1, 3 * size))
    ranks = [drawn(data, rows, numel) for _ in range(world)]
    interpreted("check_decode_signs", ranks, size, alpha, drawn(data, rows, numel))


def test_sum_of_signs_in_blocks_of_several_programs(interpreted: Check) -> None:
    generator = np.random.default_rng(0)
    ranks = [generator.standard_normal((1, 9999)).astype(np.float32) for _ in range(2)]
    for size in (4095, 4096):
        interpreted("check_decode_signs", ranks, size, 0.5, ranks[1])


@few
@given(data=st.data(), rows=counts_of_rows, width=st.integers(1, 300))
def test_sketch(interpreted: Check, data: st.DataObject, rows: int, width: int) -> None:
    numel = data.draw(st.integers(width, 6 * width))
    keys = data.draw(st.lists(st.integers(0, 2**64 - 1), min_size=rows, max_size=rows))
    interpreted("check_sketch", drawn(data, rows, numel), width, keys)
    sums, before = drawn(data, rows, width), drawn(data, rows, numel)
    interpreted("check_unsketch", sums, keys, data.draw(scales), before)


@pytest.mark.slow
def test_sketch_of_several_windows_of_signs(interpreted: Check) -> None:
    generator = np.random.default_rng(0)
    width = (1 << 15) + 5
    matrix = generator.standard_normal((1, 2 * width + 77)).astype(np.float32)
    interpreted("check_sketch", matrix, width, [12345])
    interpreted("check_unsketch", matrix[:, :width].copy(), [12345], 0.5, matrix)


@few
@given(data=st.data(), rows=counts_of_rows, numel=st.sampled_from([1, 100, 2048, 40000]))
def test_multiply_signs(interpreted: Check, data: st.DataObject, rows: int, numel: int) -> None:
    keys = data.draw(st.lists(st.integers(0, 2**64 - 1), min_size=rows, max_size=rows))
    interpreted("check_multiply_signs", drawn(data, rows, numel), keys)


@pytest.mark.parametrize("shape", [(1, 1), (3, 2), (5, 64), (7, 1024), (3, 4096), (2, 8192)])
def test_hadamard(interpreted: Check, shape: tuple[int, int]) -> None:
    """Several transforms to a program, and one in several programs."""
    matrix = np.random.default_rng(0).standard_normal(shape).astype(np.float32)
    interpreted("check_hadamard", matrix)


@pytest.mark.parametrize(
    "bits", [13, *(pytest.param(bits, marks=pytest.mark.slow) for bits in (16, 19, 20))]
)
def test_hadamard_in_several_passes(interpreted: Check, bits: int) -> None:
    """9 + 4, 12 + 4, 12 + 7 and 12 + 4 + 4 bits."""
    matrix = np.random.default_rng(0).standard_normal((2, 1 << bits)).astype(np.float32)
    interpreted("check_hadamard", matrix)


@pytest.mark.parametrize("numel", [1, 512, 513, 1024, 1025, 3000])
def test_gaussian_noise(interpreted: Check, numel: int) -> None:
    values = np.linspace(-30, 30, numel, dtype=np.float32)
    for key, counter in ((1, 1 << 128), (2**128 - 1, (2**128 - 1) << 128)):
        interpreted("check_gaussian", values, 1.7, key, counter)


def test_callers_take_them_where_available(interpreted: Check) -> None:
    interpreted("check_dispatch")


def test_all_that_is_benchmarked_runs(interpreted: Check) -> None:
    interpreted("check_benchmark")


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_the_same_on_a_gpu() -> None:
    from tests.kernels.triton import checks

    generator = np.random.default_rng(0)

    def normal(*shape: int) -> np.ndarray[Any, Any]:
        return generator.standard_normal(shape).astype(np.float32)

    for numel in (1, 4095, 4096, 1 << 20, (1 << 20) + 77):
        vectors = [normal(2, numel) for _ in range(3)]
        tied = np.round(vectors[0])
        factors = np.array([0.5, -2], np.float32)
        for size, count in ((4096, 64), (4096, 4096), (16384, 100), (1000, 1), (7, 3)):
            for matrix in (vectors[0], tied, 0 * tied):
                checks.check_top_k("cuda", matrix, size, count)
                checks.check_residual("cuda", matrix, tied, factors, size, count, 16)
            checks.check_scatter_sum("cuda", vectors, size, count, 1 / 3, tied)
        for size in (8, 104, 4096, 8192):
            checks.check_encode_signs("cuda", vectors[0], size)
            checks.check_decode_signs("cuda", vectors, size, 1 / 3, tied)
        checks.check_decode_signs("cuda", vectors, 4097, 1 / 3, tied)
        for width in {1, -(-numel // 50), -(-numel // 3), numel}:
            if numel // width <= 1 << 16:
                checks.check_sketch("cuda", vectors[0], width, [1, 2])
                checks.check_unsketch("cuda", vectors[1][:, :width].copy(), [1, 2], 0.5, tied)
        checks.check_multiply_signs("cuda", vectors[0], [1, 2])
        checks.check_gaussian("cuda", vectors[0][0], 1.7, 2**127 + 1, 2**255)
    checks.check_dispatch("cuda")
    for bits in range(24):
        checks.check_hadamard("cuda", normal(3, 1 << bits))
