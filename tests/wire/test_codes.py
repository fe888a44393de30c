"""Packing and index coding are lossless for every size."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from comm_hooks.wire import bits as bits_module
from comm_hooks.wire.bits import pack_bits, pack_codes, packed_nbytes, unpack_bits, unpack_codes
from comm_hooks.wire.elias_fano import EliasFano


@given(count=st.integers(1, 100), rows=st.integers(1, 3), seed=st.integers(0, 99))
def test_bits_round_trip(count: int, rows: int, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    bits = torch.rand(rows, count, generator=generator) < 0.5
    packed = pack_bits(bits)
    assert packed.shape == (rows, packed_nbytes(count, 1))
    assert torch.equal(unpack_bits(packed, count).bool(), bits)


@given(count=st.integers(1, 60), width=st.integers(1, 16), seed=st.integers(0, 99))
def test_codes_round_trip(count: int, width: int, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    codes = torch.randint(0, 1 << width, (2, count), generator=generator)
    packed = pack_codes(codes, width)
    assert packed.dtype == torch.uint8
    assert packed.shape == (2, packed_nbytes(count, width))
    assert torch.equal(unpack_codes(packed, count, width).long(), codes)


def test_accelerators_pack_like_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """The path without NumPy is the one that GPUs take; here it runs on the CPU."""

    class Elsewhere:
        type = "elsewhere"

    class OnAccelerator(torch.Tensor):
        device = Elsewhere()

    bits = torch.rand(3, 77) < 0.5
    packed = pack_bits(bits)
    other = pack_bits(bits.as_subclass(OnAccelerator)).as_subclass(torch.Tensor)
    assert torch.equal(other, packed)
    octets = packed.as_subclass(OnAccelerator)
    places = torch.arange(8, dtype=torch.uint8)
    monkeypatch.setattr(bits_module.torch, "arange", lambda *a, **k: places)
    assert torch.equal(unpack_bits(octets, 77).as_subclass(torch.Tensor).bool(), bits)


@given(data=st.data(), universe=st.integers(1, 5000), sets=st.integers(1, 4))
def test_elias_fano_round_trips(data: st.DataObject, universe: int, sets: int) -> None:
    count = data.draw(st.integers(1, universe))
    generator = torch.Generator().manual_seed(data.draw(st.integers(0, 99)))
    indices = torch.stack(
        [
            torch.randperm(universe, generator=generator)[:count].sort().values
            for _ in range(2 * sets)
        ]
    ).view(2, sets, count)
    code = EliasFano(universe, count)
    octets = code.encode(indices)
    assert octets.shape == (2, code.nbytes(sets))
    assert torch.equal(code.decode(octets, sets), indices)


@pytest.mark.parametrize("extreme", ["first", "last"])
def test_elias_fano_holds_the_extremes(extreme: str) -> None:
    code = EliasFano(4096, 64)
    start = 0 if extreme == "first" else 4096 - 64
    indices = torch.arange(start, start + 64)[None, None]
    assert torch.equal(code.decode(code.encode(indices), 1), indices)


@pytest.mark.parametrize(("universe", "count"), [(4096, 4), (4096, 64), (4096, 256), (1000, 10)])
def test_elias_fano_is_within_half_a_bit_and_two_of_the_entropy(universe: int, count: int) -> None:
    code = EliasFano(universe, count)
    entropy = math.log2(math.comb(universe, count)) / count
    assert 8 * code.nbytes(sets=64) / 64 / count <= entropy + 1.2
