"""Packing and index coding are lossless for every size."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from comm_hooks import PayloadError
from comm_hooks.kernels import bits as bits_module
from comm_hooks.kernels.bits import (
    pack_bits,
    pack_codes,
    packed_nbytes,
    set_places,
    unpack_bits,
    unpack_codes,
)
from comm_hooks.wire.index_codes import INDEX_CODES, IndexCode, places_code
from comm_hooks.wire.places import Bitmap, EliasFano, PlacesCode
from comm_hooks.wire.rice import Rice


class OnAccelerator(torch.Tensor):
    """Takes the paths without NumPy, which are those of GPUs, on the CPU."""

    class _Device:
        type = "elsewhere"

    device = _Device()  # type: ignore[assignment]


def elsewhere(tensor: torch.Tensor, monkeypatch: pytest.MonkeyPatch) -> torch.Tensor:
    arange, full = torch.arange, torch.full
    monkeypatch.setattr(bits_module.torch, "arange", lambda *a, device=None, **k: arange(*a, **k))
    monkeypatch.setattr(bits_module.torch, "full", lambda *a, device=None, **k: full(*a, **k))
    return tensor.as_subclass(OnAccelerator)


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
    bits = torch.rand(3, 77) < 0.5
    packed = pack_bits(bits)
    codes = [(width, torch.randint(0, 1 << width, (3, 21))) for width in range(1, 13)]
    packed_codes = [pack_codes(c, width) for width, c in codes]
    assert torch.equal(pack_bits(elsewhere(bits, monkeypatch)).as_subclass(torch.Tensor), packed)
    octets = elsewhere(packed, monkeypatch)
    assert torch.equal(unpack_bits(octets, 77).as_subclass(torch.Tensor).bool(), bits)
    for (width, plain), expected in zip(codes, packed_codes, strict=True):
        own = pack_codes(elsewhere(plain, monkeypatch), width).as_subclass(torch.Tensor)
        assert torch.equal(own, expected), width
        back = unpack_codes(elsewhere(expected, monkeypatch), 21, width)
        assert torch.equal(back.as_subclass(torch.Tensor).long(), plain), width


@given(data=st.data(), sets=st.integers(1, 4), width=st.integers(1, 40))
def test_accelerators_find_set_bits_like_the_cpu(
    data: st.DataObject, sets: int, width: int
) -> None:
    counts = data.draw(st.lists(st.integers(0, width), min_size=sets, max_size=sets))
    bits = torch.zeros(1, sets, width, dtype=torch.uint8)
    for row, count in zip(bits[0], counts, strict=True):
        row[torch.randperm(width)[:count]] = 1
    most = max(1, *counts)
    expected = set_places(bits, most, missing=width)
    with pytest.MonkeyPatch.context() as monkeypatch:
        found = set_places(elsewhere(bits, monkeypatch), most, missing=width)
    assert torch.equal(found.as_subclass(torch.Tensor), expected)
    for row, places, count in zip(bits[0], expected[0], counts, strict=True):
        assert places[:count].tolist() == row.nonzero().flatten().tolist()
        assert (places[count:] == width).all()


def random_sets(universe: int, count: int, sets: int, seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    members = [torch.randperm(universe, generator=generator)[:count] for _ in range(2 * sets)]
    return torch.stack(members).sort(dim=1).values.view(2, sets, count)


def clustered_sets(universe: int, count: int, sets: int, seed: int) -> torch.Tensor:
    """Runs of neighbours, far apart: what a Rice code likes least."""
    generator = torch.Generator().manual_seed(seed)
    rows = []
    for _ in range(2 * sets):
        taken = torch.zeros(universe, dtype=torch.bool)
        while taken.sum() < count:
            start = int(torch.randint(universe, (1,), generator=generator))
            missing = count - int(taken.sum())
            taken[start : start + min(missing, 1 + count // 8)] = True
        rows.append(taken.nonzero().flatten()[:count])
    return torch.stack(rows).view(2, sets, count)


def check_round_trip(code: PlacesCode, indices: torch.Tensor, first: list[int]) -> torch.Tensor:
    """Return which indices arrived, having checked that those did unchanged."""
    first_sets = np.array(first)
    octets, present = code.encode(indices, first_sets)
    sets = indices.shape[1]
    assert octets.shape == (len(indices), code.nbytes(sets))
    # What follows in a payload is none of the code's business.
    octets = torch.nn.functional.pad(octets, (0, 3), value=255)
    decoded, still_present = code.decode(octets, sets, first_sets)
    if present is None:
        assert still_present is None
        present = torch.ones_like(indices, dtype=torch.bool)
    else:
        assert still_present is not None
        assert torch.equal(still_present, present)
    assert torch.equal(decoded[present], indices[present])
    assert ((decoded >= 0) & (decoded < code.universe)).all()
    return present


@pytest.mark.parametrize("code", [Bitmap, EliasFano])
@given(data=st.data(), universe=st.integers(1, 5000), sets=st.integers(1, 4))
def test_codes_of_constant_size_hold_any_places(
    code: type[PlacesCode], data: st.DataObject, universe: int, sets: int
) -> None:
    count = data.draw(st.integers(1, universe))
    draw = data.draw(st.sampled_from([random_sets, clustered_sets]))
    indices = draw(universe, count, sets, data.draw(st.integers(0, 99)))
    check_round_trip(code(universe, count), indices, [0, 0])  # type: ignore[call-arg]


@pytest.mark.parametrize("name", INDEX_CODES)
@given(data=st.data(), universe=st.integers(1, 5000), sets=st.integers(1, 4))
def test_what_there_is_room_for_arrives(
    name: IndexCode, data: st.DataObject, universe: int, sets: int
) -> None:
    count = data.draw(st.integers(0, universe))
    draw = data.draw(st.sampled_from([random_sets, clustered_sets]))
    indices = draw(universe, count, sets, data.draw(st.integers(0, 99)))
    first = data.draw(st.lists(st.integers(0, sets - 1), min_size=2, max_size=2))
    check_round_trip(places_code(name, universe, count), indices, first)


@pytest.mark.parametrize(("universe", "count"), [(4096, 4), (4096, 64), (4096, 256), (1000, 10)])
@pytest.mark.parametrize("sets", [1, 16, 500])
def test_rice_has_room_for_random_places(universe: int, count: int, sets: int) -> None:
    for seed in range(3):
        indices = random_sets(universe, count, sets, seed)
        assert check_round_trip(Rice(universe, count), indices, [0, sets // 2]).all()


def test_what_does_not_fit_changes_with_the_first_set() -> None:
    """Every set gets its turn, so that what error feedback keeps of it is not kept for ever."""
    code, sets = Rice(4096, 64), 40
    worst = torch.cat([torch.arange(63), torch.tensor([4095])])
    indices = worst.expand(2, sets, 64).contiguous()
    arrived = torch.zeros(sets)
    for first in range(sets):
        present = check_round_trip(code, indices, [first, 0])
        assert present[0, first].all()
        assert not present.all()
        arrived += present[0].all(dim=1)
    assert arrived.min() > sets / 2


@pytest.mark.parametrize(
    ("universe", "count", "elias_fano", "rice"),
    [(4096, 4, 0.9, 0.33), (4096, 64, 0.63, 0.17), (4096, 256, 0.63, 0.13), (1000, 10, 0.73, 0.22)],
)
def test_bits_above_the_entropy(universe: int, count: int, elias_fano: float, rice: float) -> None:
    entropy = math.log2(math.comb(universe, count)) / count
    for name, above in (("elias_fano", elias_fano), ("rice", rice)):
        code = places_code(name, universe, count)  # type: ignore[arg-type]
        assert 8 * code.nbytes(sets=2000) / 2000 / count <= entropy + above


def test_the_shortest_code_is_chosen() -> None:
    assert places_code("rice", 100, 100).nbytes(7) == places_code("elias_fano", 9, 0).nbytes(7) == 0
    assert isinstance(places_code("rice", 100, 50), Bitmap)
    assert isinstance(places_code("elias_fano", 4096, 64), EliasFano)
    assert isinstance(places_code("rice", 4096, 64), Rice)


@pytest.mark.parametrize("name", INDEX_CODES)
@given(data=st.data())
def test_any_bytes_decode_to_places_or_are_refused(name: IndexCode, data: st.DataObject) -> None:
    universe = data.draw(st.integers(1, 300))
    count = data.draw(st.integers(0, universe))
    code = places_code(name, universe, count)
    octets = data.draw(st.binary(min_size=code.nbytes(2), max_size=code.nbytes(2)))
    payload = torch.tensor(list(octets), dtype=torch.uint8)[None]
    try:
        indices, _ = code.decode(payload, 2, np.array([0]))
    except PayloadError:
        return
    assert indices.shape == (1, 2, count)
    assert ((indices >= 0) & (indices < universe)).all()


@given(data=st.data())
def test_accelerators_do_not_write_where_any_bytes_say(data: st.DataObject) -> None:
    """There the checksum is judged later, and a kernel would write before the vector."""
    universe = data.draw(st.integers(2, 300))
    code = EliasFano(universe, data.draw(st.integers(1, universe)))
    octets = data.draw(st.binary(min_size=code.nbytes(2), max_size=code.nbytes(2)))
    payload = torch.tensor(list(octets), dtype=torch.uint8)[None]
    with pytest.MonkeyPatch.context() as monkeypatch:
        on_accelerator = elsewhere(payload, monkeypatch)
        indices, _ = code.decode(on_accelerator, 2, np.array([0]))
    assert ((indices >= 0) & (indices < universe)).all()
