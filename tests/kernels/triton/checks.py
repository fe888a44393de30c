"""What each kernel must return: the same as its reference.  Raise ``AssertionError`` if not.

Imported where Triton's interpreter is on, or where there is a GPU.  Arrays are NumPy's, which are
cheap to send to a process.
"""

import functools
from collections.abc import Callable
from types import ModuleType
from unittest import mock

import numpy as np
import torch
from numpy.typing import NDArray

from benchmarks import gpu_kernels
from comm_hooks import kernels
from comm_hooks.kernels.count_sketch import draw, reference_sketch, reference_unsketch
from comm_hooks.kernels.gaussian import reference_add_gaussian_
from comm_hooks.kernels.hadamard import reference_hadamard
from comm_hooks.kernels.residual import Residual
from comm_hooks.kernels.scatter import reference_scatter_sum
from comm_hooks.kernels.signs import reference_decode_signs, reference_encode_signs
from comm_hooks.kernels.top_k import reference_block_top_k
from comm_hooks.kernels.triton import (
    LARGEST_BLOCK,
    count_sketch,
    gaussian,
    hadamard,
    random_signs,
    scatter,
    signs,
    top_k,
)

Array = NDArray[np.float32]
Call = Callable[[], object]

exactly = functools.partial(torch.testing.assert_close, rtol=0, atol=0, equal_nan=True)


def check_top_k(device: str, matrix: Array, size: int, count: int) -> None:
    rows = torch.from_numpy(matrix).to(device)
    before = rows.clone()
    found = top_k.block_top_k(rows, size, count)
    exactly(rows, before)
    for result, expected in zip(found, reference_block_top_k(rows, size, count), strict=True):
        exactly(result, expected)


def check_residual(
    device: str, matrix: Array, vectors: Array, factors: Array, size: int, count: int, bits: int
) -> None:
    """The kernels that add a residual do as if it had been added before, by one factor or many."""
    dtype = torch.float32 if bits == 32 else torch.bfloat16
    stored = torch.from_numpy(vectors).to(device).to(dtype)
    for factor in (torch.from_numpy(factors).to(device)[:, None], 1.0):
        residual = Residual(stored, factor)
        rows = torch.from_numpy(matrix).to(device)
        total = rows.clone()
        residual.add_to(total)

        chosen_of = rows.clone()
        found = top_k.block_top_k(chosen_of, size, count, residual)
        exactly(chosen_of, total)
        for result, expected in zip(found, reference_block_top_k(total, size, count), strict=True):
            exactly(result, expected)

        of_whole_bytes = -(-size // 8) * 8
        for subtract in (False, True):
            found_rows, expected_rows = rows.clone(), total.clone()
            coded = signs.encode_signs(
                found_rows, of_whole_bytes, residual=residual, subtract=subtract
            )
            expected = signs.encode_signs(expected_rows, of_whole_bytes, subtract=subtract)
            for result, reference in zip(coded, expected, strict=True):
                exactly(result, reference)
            exactly(found_rows, expected_rows)


def check_scatter_sum(
    device: str, ranks: list[Array], size: int, count: int, alpha: float, before: Array
) -> None:
    """Send the largest of each block of each rank; what is zero has the row's last place."""
    places, values = [], []
    for rank in ranks:
        rank_places, rank_values = reference_block_top_k(torch.from_numpy(rank), size, count)
        rank_places += torch.arange(rank_places.shape[1])[:, None] * size
        numel = rank.shape[1]
        places.append(torch.where(rank_values == 0, numel - 1, rank_places))
        values.append(rank_values)
    there = torch.stack(places).to(device), torch.stack(values).to(device)
    for add in (False, True):
        out = torch.from_numpy(before).to(device).clone()
        expected = out.clone()
        scatter.scatter_sum(out, *there, size, alpha=alpha, add=add)
        reference_scatter_sum(expected, *there, size, alpha=alpha, add=add)
        exactly(out, expected)


def check_encode_signs(device: str, matrix: Array, size: int) -> None:
    rows = torch.from_numpy(matrix).to(device)
    rest = rows.clone()
    scales, octets = signs.encode_signs(rows, size)
    exactly(rows, rest)
    expected_scales, expected_octets = reference_encode_signs(rows, size)
    torch.testing.assert_close(scales, expected_scales, rtol=1e-5, atol=0, equal_nan=True)
    exactly(octets, expected_octets)

    subtracted = signs.encode_signs(rest, size, subtract=True)
    exactly(subtracted[0], scales)
    exactly(subtracted[1], octets)
    reference_decode_signs(rows, scales, octets, size, alpha=-1.0, add=True)
    exactly(rest, rows)

    given = torch.arange(1.0, 1 + scales.numel()).view_as(scales).to(device)
    rows, expected_rows = (torch.from_numpy(matrix.copy()).to(device) for _ in range(2))
    coded = signs.encode_signs(rows, size, subtract=True, scales=given)
    expected = reference_encode_signs(expected_rows, size, subtract=True, scales=given)
    for result, reference in zip((*coded, rows), (*expected, expected_rows), strict=True):
        exactly(result, reference)


def check_decode_signs(
    device: str, ranks: list[Array], size: int, alpha: float, before: Array
) -> None:
    """The sections of a payload stand one after the other, so they are not contiguous."""
    numel = before.shape[1]
    coded = [reference_encode_signs(torch.from_numpy(rank), size) for rank in ranks]
    sections = [torch.cat([s.view(torch.uint8), octets], dim=1) for s, octets in coded]
    padding = -sections[0].shape[1] % 4
    payloads = torch.nn.functional.pad(torch.stack(sections), (0, padding)).to(device)
    split = 4 * -(-numel // size)
    scales, octets = payloads.view(torch.float32)[:, :, : split // 4], payloads[:, :, split:]
    for add in (False, True):
        out = torch.from_numpy(before).to(device).clone()
        expected = out.clone()
        signs.decode_sum_of_signs(out, scales, octets, size, alpha=alpha, add=add)
        for rank in range(len(ranks)):
            reference_decode_signs(
                expected, scales[rank], octets[rank], size, alpha=alpha, add=add or rank > 0
            )
        exactly(out, expected)
    out = torch.from_numpy(before).to(device).clone()
    expected = out.clone()
    signs.decode_signs(out, scales[0], octets[0], size, alpha=alpha, add=True)
    reference_decode_signs(expected, scales[0], octets[0], size, alpha=alpha, add=True)
    exactly(out, expected)


def check_sketch(device: str, matrix: Array, width: int, keys: list[int]) -> None:
    """With integers sums are exact, so that one element in a wrong place would show."""
    rows = torch.from_numpy(np.round(100 * np.nan_to_num(matrix))).to(device)
    draws = draw(keys, rows.shape[1], width)
    exactly(count_sketch.sketch(rows, width, *draws), reference_sketch(rows, width, *draws))


def check_unsketch(
    device: str, sketches: Array, keys: list[int], alpha: float, before: Array
) -> None:
    there = torch.from_numpy(sketches).to(device)
    draws = draw(keys, before.shape[1], sketches.shape[1])
    for add in (False, True):
        out = torch.from_numpy(before).to(device).clone()
        expected = out.clone()
        count_sketch.unsketch(out, there, *draws, alpha=alpha, add=add)
        reference_unsketch(expected, there, *draws, alpha=alpha, add=add)
        exactly(out, expected)


def check_multiply_signs(device: str, matrix: Array, keys: list[int]) -> None:
    rows = torch.from_numpy(matrix).to(device)
    expected = kernels.random_signs.multiply_signs_(torch.from_numpy(matrix).clone(), keys)
    offsets = kernels.random_signs.sign_offsets(
        keys, -(-rows.shape[1] // kernels.random_signs.SIGN_WINDOW)
    )
    exactly(random_signs.multiply_signs_(rows, offsets).cpu(), expected)


def check_hadamard(
    device: str, matrix: Array, tile: int = hadamard._TILE, columns: int = hadamard._COLUMNS
) -> None:
    rows = torch.from_numpy(matrix).to(device)
    before = rows.clone()
    with mock.patch.multiple(hadamard, _TILE=tile, _COLUMNS=columns):
        found = hadamard.hadamard(rows)
    exactly(rows, before)
    assert found.is_contiguous()
    tolerance = 1e-6 * float(rows.double().square().sum(1).max().sqrt())
    torch.testing.assert_close(found, reference_hadamard(rows), rtol=1e-6, atol=tolerance)


def check_dispatch(device: str) -> None:
    """What callers use takes the kernels where they are available, and else does without."""
    rows = torch.arange(64.0, device=device)[None]
    draws = draw([1], 64, 16)
    scales, octets = reference_encode_signs(rows, 64)
    decoding = rows.clone(), scales, octets, 64
    calls: list[tuple[ModuleType, ModuleType, str, Call]] = [
        (kernels.hadamard, hadamard, "hadamard", lambda: kernels.hadamard.hadamard(rows)),
        (
            kernels.top_k,
            top_k,
            "block_top_k",
            lambda: kernels.top_k.block_top_k(rows, 32, 3),
        ),
        (
            kernels.signs,
            signs,
            "encode_signs",
            lambda: kernels.signs.encode_signs(rows.clone(), 64, subtract=True),
        ),
        (
            kernels.signs,
            signs,
            "decode_signs",
            lambda: kernels.signs.decode_signs(*decoding, alpha=0.5, add=False),
        ),
        (
            kernels.signs,
            signs,
            "decode_sum_of_signs",
            lambda: kernels.signs.decode_sum_of_signs(
                rows.clone(), scales[None], octets[None], 64, alpha=0.5
            ),
        ),
        (
            kernels.scatter,
            scatter,
            "scatter_sum",
            lambda: kernels.scatter.scatter_sum(
                rows.clone(),
                torch.zeros(2, 1, 2, 1, dtype=torch.int64, device=device),
                torch.zeros(2, 1, 2, 1, device=device),
                32,
                alpha=0.5,
                add=False,
            ),
        ),
        (
            kernels.count_sketch,
            count_sketch,
            "sketch",
            lambda: kernels.count_sketch.sketch(rows, 16, *draws),
        ),
        (
            kernels.count_sketch,
            count_sketch,
            "unsketch",
            lambda: kernels.count_sketch.unsketch(
                rows.clone(), rows[:, :16].clone(), *draws, alpha=0.5, add=True
            ),
        ),
        (
            kernels.random_signs,
            random_signs,
            "multiply_signs_",
            lambda: kernels.random_signs.multiply_signs_(rows.clone(), [1]),
        ),
        (
            kernels.gaussian,
            gaussian,
            "add_gaussian_",
            lambda: kernels.gaussian.add_gaussian_(rows[0].clone(), 1.0, 1 << 127, 1 << 128),
        ),
    ]
    for module, on_gpu, name, call in calls:
        for is_available in (True, False):
            with (
                mock.patch.object(module, "available", return_value=is_available),
                mock.patch.object(on_gpu, name, wraps=getattr(on_gpu, name)) as kernel,
            ):
                result = call()
            assert kernel.called == is_available, name
            if isinstance(result, torch.Tensor) and is_available:
                expected = result
        if isinstance(result, torch.Tensor):
            torch.testing.assert_close(result, expected)
    # What a program cannot hold, or would share a byte of, is left to the others.
    with mock.patch.object(kernels.signs, "available", return_value=True):
        for size in (12, 2 * LARGEST_BLOCK):
            with mock.patch.object(signs, "encode_signs") as kernel:
                kernels.signs.encode_signs(rows, size)
            assert not kernel.called
    with (
        mock.patch.object(kernels.top_k, "available", return_value=True),
        mock.patch.object(top_k, "block_top_k") as kernel,
    ):
        kernels.top_k.block_top_k(torch.ones(1, 8, device=device), LARGEST_BLOCK + 1, 1)
    assert not kernel.called


def check_benchmark(device: str) -> None:
    """Every measured call runs, and its bytes are counted."""
    cases = gpu_kernels.cases(8192, device)
    for case in cases:
        case.call()
    assert all(8192 <= case.nbytes < 13 * 8192 for case in cases)


def check_gaussian(device: str, values: Array, std: float, key: int, counter: int) -> None:
    """float64, rounded once at the end: to the other side, where a logarithm's last bit differs."""
    found, expected = torch.from_numpy(values).to(device), torch.from_numpy(values.copy())
    gaussian.add_gaussian_(found, std, key, counter)
    reference_add_gaussian_(expected, std, key, counter)
    torch.testing.assert_close(found.cpu(), expected, rtol=1.2e-7, atol=1e-13 * std)
    assert (found.cpu() != expected).sum() <= 1 + len(values) // 1000
