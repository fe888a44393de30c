"""What each kernel must return: the same as its reference.  Raise ``AssertionError`` if not.

Imported where Triton's interpreter is on, or where there is a GPU.  Arrays are NumPy's, which are
cheap to send to a process.
"""

import functools
import importlib
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import numpy as np
import torch
from numpy.typing import NDArray

from benchmarks import gpu_kernels
from comm_hooks.kernels import gaussian as gaussian_on_cpu
from comm_hooks.kernels import operators
from comm_hooks.kernels.count_sketch import sketch, unsketch
from comm_hooks.kernels.gaussian import reference_add_gaussian_
from comm_hooks.kernels.hadamard import hadamard as hadamard_of
from comm_hooks.kernels.random_signs import multiply_signs_
from comm_hooks.kernels.residual import Residual
from comm_hooks.kernels.scatter import scatter_sum
from comm_hooks.kernels.signs import decode_signs, encode_signs
from comm_hooks.kernels.top_k import block_top_k
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

exactly = functools.partial(torch.testing.assert_close, rtol=0, atol=0, equal_nan=True)


def check_top_k(device: str, matrix: Array, size: int, count: int) -> None:
    rows = torch.from_numpy(matrix).to(device)
    before = rows.clone()
    found = top_k.block_top_k(rows, size, count)
    exactly(rows, before)
    for result, expected in zip(found, block_top_k.reference(rows, size, count), strict=True):
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
        for result, expected in zip(found, block_top_k.reference(total, size, count), strict=True):
            exactly(result, expected)

        of_whole_bytes = -(-size // 8) * 8
        scales, octets = signs.encode_signs(total, of_whole_bytes)
        for subtract in (False, True):
            rest, expected_rest = rows.clone(), total.clone()
            coded = signs.encode_signs(rest, of_whole_bytes, residual=residual, subtract=subtract)
            # A GPU adds magnitudes in another order where elements of 16 bits are read as well.
            torch.testing.assert_close(coded[0], scales, rtol=1e-5, atol=0, equal_nan=True)
            exactly(coded[1], octets)
            if subtract:
                signs.encode_signs(expected_rest, of_whole_bytes, subtract=True, scales=coded[0])
            exactly(rest, expected_rest)


def check_scatter_sum(
    device: str, ranks: list[Array], size: int, count: int, alpha: float, before: Array
) -> None:
    """Send the largest of each block of each rank; what is zero has the row's last place."""
    places, values = [], []
    for rank in ranks:
        rank_places, rank_values = block_top_k.reference(torch.from_numpy(rank), size, count)
        rank_places += torch.arange(rank_places.shape[1])[:, None] * size
        numel = rank.shape[1]
        places.append(torch.where(rank_values == 0, numel - 1, rank_places))
        values.append(rank_values)
    there = torch.stack(places).to(device), torch.stack(values).to(device)
    for add in (False, True):
        out = torch.from_numpy(before).to(device).clone()
        expected = out.clone()
        scatter.scatter_sum(out, *there, size, alpha=alpha, add=add)
        scatter_sum.reference(expected, *there, size, alpha=alpha, add=add)
        exactly(out, expected)


def check_encode_signs(device: str, matrix: Array, size: int) -> None:
    rows = torch.from_numpy(matrix).to(device)
    rest = rows.clone()
    scales, octets = signs.encode_signs(rows, size)
    exactly(rows, rest)
    expected_scales, expected_octets = encode_signs.reference(rows, size)
    torch.testing.assert_close(scales, expected_scales, rtol=1e-5, atol=0, equal_nan=True)
    exactly(octets, expected_octets)

    subtracted = signs.encode_signs(rest, size, subtract=True)
    exactly(subtracted[0], scales)
    exactly(subtracted[1], octets)
    decode_signs.reference(rows, scales[None], octets[None], size, alpha=-1.0, add=True)
    exactly(rest, rows)

    given = torch.arange(1.0, 1 + scales.numel()).view_as(scales).to(device)
    rows, expected_rows = (torch.from_numpy(matrix.copy()).to(device) for _ in range(2))
    coded = signs.encode_signs(rows, size, subtract=True, scales=given)
    expected = encode_signs.reference(expected_rows, size, subtract=True, scales=given)
    for result, reference in zip((*coded, rows), (*expected, expected_rows), strict=True):
        exactly(result, reference)


def check_decode_signs(
    device: str, ranks: list[Array], size: int, alpha: float, before: Array
) -> None:
    """The sections of a payload stand one after the other, so they are not contiguous."""
    numel = before.shape[1]
    coded = [encode_signs.reference(torch.from_numpy(rank), size) for rank in ranks]
    sections = [torch.cat([s.view(torch.uint8), octets], dim=1) for s, octets in coded]
    padding = -sections[0].shape[1] % 4
    payloads = torch.nn.functional.pad(torch.stack(sections), (0, padding)).to(device)
    split = 4 * -(-numel // size)
    scales, octets = payloads.view(torch.float32)[:, :, : split // 4], payloads[:, :, split:]
    for add in (False, True):
        out = torch.from_numpy(before).to(device).clone()
        expected = out.clone()
        signs.decode_signs(out, scales, octets, size, alpha=alpha, add=add)
        decode_signs.reference(expected, scales, octets, size, alpha=alpha, add=add)
        exactly(out, expected)


def check_sketch(device: str, matrix: Array, width: int, keys: list[int]) -> None:
    """With integers sums are exact, so that one element in a wrong place would show."""
    rows = torch.from_numpy(np.round(100 * np.nan_to_num(matrix))).to(device)
    exactly(count_sketch.sketch(rows, width, keys), sketch.reference(rows, width, keys))


def check_unsketch(
    device: str, sketches: Array, keys: list[int], alpha: float, before: Array
) -> None:
    there = torch.from_numpy(sketches).to(device)
    for add in (False, True):
        out = torch.from_numpy(before).to(device).clone()
        expected = out.clone()
        count_sketch.unsketch(out, there, keys, alpha=alpha, add=add)
        unsketch.reference(expected, there, keys, alpha=alpha, add=add)
        exactly(out, expected)


def check_multiply_signs(device: str, matrix: Array, keys: list[int]) -> None:
    rows = torch.from_numpy(matrix).to(device)
    expected = multiply_signs_.reference(torch.from_numpy(matrix).clone(), keys)
    exactly(random_signs.multiply_signs_(rows, keys).cpu(), expected)


def check_hadamard(device: str, matrix: Array) -> None:
    rows = torch.from_numpy(matrix).to(device)
    before = rows.clone()
    found = hadamard.hadamard(rows)
    exactly(rows, before)
    assert found.is_contiguous()
    tolerance = 1e-6 * float(rows.double().square().sum(1).max().sqrt())
    torch.testing.assert_close(found, hadamard_of.reference(rows), rtol=1e-6, atol=tolerance)


def check_dispatch(device: str) -> None:
    """What callers use takes the kernels where they are available, and else does without."""
    rows = torch.arange(64.0, device=device)[None]
    scales, octets = encode_signs.reference(rows, 64)
    places = torch.zeros(2, 1, 2, 1, dtype=torch.int64, device=device)
    write = {"alpha": 0.5, "add": False}
    calls: list[tuple[Any, tuple[Any, ...], dict[str, Any]]] = [
        (hadamard_of, (), {}),
        (block_top_k, (32, 3), {}),
        (encode_signs, (64,), {"subtract": True}),
        (decode_signs, (scales[None], octets[None], 64), write),
        (scatter_sum, (places, places.float(), 32), write),
        (sketch, (16, [1]), {}),
        (unsketch, (rows[:, :16].clone(), [1]), write),
        (multiply_signs_, ([1],), {}),
    ]
    for operator, args, kwargs in calls:
        found = []
        for is_available in (True, False):
            first = rows.clone()
            with _watched(operator, is_available) as kernel:
                found.append((operator(first, *args, **kwargs), first))
            assert kernel.called == is_available, operator.reference
        torch.testing.assert_close(*found)
    for is_available in (True, False):
        with (
            mock.patch.object(gaussian_on_cpu, "available", return_value=is_available),
            mock.patch.object(gaussian, "add_gaussian_", wraps=gaussian.add_gaussian_) as kernel,
        ):
            gaussian_on_cpu.add_gaussian_(rows[0].clone(), 1.0, 1 << 127, 1 << 128)
        assert kernel.called == is_available
    # What a program cannot hold, or would share a byte of, is left to the others.
    for operator, args in (
        (encode_signs, (12,)),
        (encode_signs, (2 * LARGEST_BLOCK,)),
        (block_top_k, (LARGEST_BLOCK + 1, 1)),
    ):
        with _watched(operator, True) as kernel:
            operator(rows, *args)
        assert not kernel.called, args


@contextmanager
def _watched(operator: Any, is_available: bool) -> Iterator[mock.Mock]:
    """Yield what tells whether the kernel of an operator was called."""
    name = operator.reference.__name__
    module = importlib.import_module(
        operator.reference.__module__.replace(".kernels.", ".kernels.triton.")
    )
    with (
        mock.patch.object(operators, "available", return_value=is_available),
        mock.patch.object(module, name, wraps=getattr(module, name)) as kernel,
    ):
        yield kernel


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
