"""What every compressor promises, whatever it does inside."""

import math
import re
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from comm_hooks import Cocktail, Compressor, DCTTopK, Identity, TopK
from comm_hooks.compressors import sparse
from comm_hooks.kernels.residual import Residual
from comm_hooks.randomness import Draw
from comm_hooks.wire.index_codes import INDEX_CODES, IndexCode
from comm_hooks.wire.values import VALUE_BITS
from tests.compressors.catalog import ALL, representative

every_compressor = pytest.mark.parametrize("compressor", representative(ALL))
numels = st.one_of(st.integers(1, 70), st.sampled_from([100, 129, 4096, 4097, 9000]))
keys = st.integers(0, 2**64 - 1)
members = st.floats(-1e6, 1e6, width=32).map(lambda x: x if abs(x) > 1e-15 else 0.0)


def gaussian(numel: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(numel, generator=torch.Generator().manual_seed(seed))


@every_compressor
@given(numel=numels, key=keys, world=st.integers(1, 5), data=st.data())
def test_payload_has_the_promised_size_and_round_trips_to_the_same_length(
    compressor: Compressor, numel: int, key: int, world: int, data: st.DataObject
) -> None:
    rank = data.draw(st.integers(0, world - 1))
    place = {"key": key, "rank": rank, "world_size": world}
    payload = compressor.compress(gaussian(numel), **place)
    assert payload.dim() == 1
    assert payload.is_contiguous()
    assert payload.nbytes == compressor.payload_nbytes(numel, world_size=world)
    assert payload.nbytes % 4 == 0
    assert payload.dtype == torch.float32 if compressor.linear else True
    vector = compressor.decompress(payload, numel, **place)
    assert vector.shape == (numel,)
    assert vector.dtype == torch.float32
    assert vector.isfinite().all()
    out = torch.full((numel,), float("nan"))
    assert compressor.decompress(payload, numel, **place, out=out) is out
    assert torch.equal(out, vector)


@every_compressor
@given(numel=numels, key=keys)
def test_equal_keys_give_equal_payloads_and_the_input_is_untouched(
    compressor: Compressor, numel: int, key: int
) -> None:
    vector = gaussian(numel)
    before = vector.clone()
    first, second = (compressor.compress(vector, key=key) for _ in range(2))
    assert torch.equal(first, second)
    assert torch.equal(vector, before)


@every_compressor
@given(numel=numels, key=keys)
def test_zeros_stay_zeros(compressor: Compressor, numel: int, key: int) -> None:
    payload = compressor.compress(torch.zeros(numel), key=key)
    assert not compressor.decompress(payload, numel, key=key).any()


@every_compressor
def test_rows_are_compressed_as_if_alone(compressor: Compressor) -> None:
    rows = gaussian(3 * 1000).view(3, 1000)
    row_keys = [5, 2**63 + 11, 6]
    payloads = compressor.encode(rows, Draw(row_keys, 1, 3))
    alone = [
        compressor.compress(r, key=k, rank=1, world_size=3)
        for r, k in zip(rows, row_keys, strict=True)
    ]
    # Matrix products may sum in another order for another number of rows.
    for payload, single in zip(payloads, alone, strict=True):
        if payload.dtype == torch.uint8:
            assert torch.equal(payload, single)
        else:
            torch.testing.assert_close(payload, single)


@every_compressor
@pytest.mark.parametrize("alpha", [1.0, -1.0, 0.25])
def test_decoding_scales_and_adds(compressor: Compressor, alpha: float) -> None:
    vector = gaussian(1000)
    payload = compressor.compress(vector, key=3)
    decoded = compressor.decompress(payload, 1000, key=3)
    kept = payload.clone()
    octets = payload.view(torch.uint8)[None]
    out = torch.full((1, 1000), 7.0)
    compressor.decode(out, octets, Draw([3]), alpha=alpha, add=True)
    torch.testing.assert_close(out[0], 7 + alpha * decoded)
    compressor.decode(out, octets, Draw([3]), alpha=alpha)
    torch.testing.assert_close(out[0], alpha * decoded)
    assert torch.equal(payload, kept), "a payload is still to be sent, or shared by all ranks"


@every_compressor
@pytest.mark.parametrize("factor", [None, 0.5, torch.tensor([[0.0], [-2.0]])], ids=str)
@pytest.mark.parametrize("numel", [7, 640, 5000])
def test_what_is_extracted_is_what_arrives(
    compressor: Compressor, factor: float | torch.Tensor | None, numel: int
) -> None:
    vectors, added = gaussian(4 * numel).view(2, 2, numel)
    residual = None if factor is None else Residual(added, factor)
    rest, draw = vectors.clone(), Draw([3, 4])
    payloads = compressor.extract(rest, draw, residual)
    if residual:
        residual.add_to(vectors)
    assert torch.equal(payloads, compressor.encode(vectors, draw))
    compressor.decode(vectors, payloads.view(torch.uint8), draw, alpha=-1.0, add=True)
    torch.testing.assert_close(rest, vectors)


@pytest.mark.parametrize("compressor", representative([c for c in ALL if c.adds_up]))
@pytest.mark.parametrize("ranks", [1, 3, sparse._RANKS_AT_ONCE + 1])
@pytest.mark.parametrize("entries_at_once", [1, 1 << 15])
def test_a_sum_is_that_of_rank_after_rank(
    compressor: Compressor, ranks: int, entries_at_once: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Bit for bit: the mean must be the same on ranks that compute it in one way or the other."""
    monkeypatch.setattr(sparse, "_ENTRIES_AT_ONCE", entries_at_once)
    vectors = gaussian(ranks * 1000).view(ranks, 2, 500)
    vectors[0, 0, 7:] = 0
    draws = [Draw([3, 4], rank, ranks) for rank in range(ranks)]
    coded = [compressor.encode(*pair) for pair in zip(vectors, draws, strict=True)]
    payloads = torch.stack(coded).view(torch.uint8)
    # In a message of several parts a part's payloads are not contiguous.
    message = torch.nn.functional.pad(payloads.flatten(1), (16, 8))
    payloads = message[:, 16:-8].unflatten(1, (2, -1))
    out, expected = torch.full((2, 2, 500), torch.nan)
    for octets, draw in zip(payloads, draws, strict=True):
        compressor.decode(expected, octets, draw, alpha=1 / ranks, add=draw.rank > 0)
    compressor.decode_sum(out, payloads, draws[-1], alpha=1 / ranks)
    assert torch.equal(out, expected)


@pytest.mark.parametrize("compressor", representative([c for c in ALL if c.linear]))
@given(numel=numels, key=keys)
def test_linear_payloads_may_be_summed(compressor: Compressor, numel: int, key: int) -> None:
    v, h = gaussian(numel, 1), gaussian(numel, 2)
    total = compressor.compress(v, key=key) + compressor.compress(h, key=key)
    torch.testing.assert_close(total, compressor.compress(v + h, key=key), atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("compressor", representative([c for c in ALL if c.unbiased]))
def test_unbiased_means_unbiased(compressor: Compressor) -> None:
    draws, numel = 2000, 200
    vector, draw = gaussian(numel), Draw(range(draws), 0, 2)
    payloads = compressor.encode(vector.repeat(draws, 1), draw)
    decoded = torch.empty(draws, numel)
    compressor.decode(decoded, payloads.view(torch.uint8), draw)
    deviation = (decoded - vector).double().square().sum(0).sqrt() / draws
    error = (decoded.double().mean(0) - vector).abs()
    # 200 coordinates at once: 5 standard deviations happen once in 9000 such tests by chance.
    assert (error <= 5 * deviation + 1e-5).all()


@pytest.mark.parametrize(
    "compressor", representative([c for c in ALL if getattr(c, "stochastic", False)])
)
def test_stochastic_rounding_is_independent_across_ranks(compressor: Compressor) -> None:
    """Errors of ranks that hold the same vector then average out."""
    vector, ranks = gaussian(4000), 16
    decoded = [
        compressor.decompress(compressor.compress(vector, key=1, rank=r), 4000, key=1)
        for r in range(ranks)
    ]
    alone = (decoded[0] - vector).square().mean()
    together = (torch.stack(decoded).mean(0) - vector).square().mean()
    assert together < 1.3 * alone / ranks


@pytest.mark.parametrize("compressor", representative([c for c in ALL if c.contractive]))
@given(numel=numels, key=keys, heavy=st.booleans())
def test_contractive_means_contractive(
    compressor: Compressor, numel: int, key: int, heavy: bool
) -> None:
    vector = gaussian(numel) ** (7 if heavy else 1)
    payload = compressor.compress(vector, key=key)
    error = compressor.decompress(payload, numel, key=key) - vector
    # Rounding of values to bfloat16 may add a little to a vector that is kept whole.
    assert error.norm() <= vector.norm() * (1 + 1e-6) + 1e-6


@pytest.mark.parametrize("value_bits", VALUE_BITS)
@given(
    members=st.lists(members, min_size=1, max_size=80),
    key=keys,
    size=st.integers(1, 12),
    mask=st.floats(0.01, 1),
    density=st.one_of(st.floats(0.01, 1), st.sampled_from([0.01, 0.1, 0.3, 0.9, 1.0])),
    index_code=st.sampled_from(INDEX_CODES),
)
def test_coarse_values_are_contractive_for_any_vector(
    value_bits: int,
    members: list[float],
    key: int,
    size: int,
    mask: float,
    density: float,
    index_code: IndexCode,
) -> None:
    vector = torch.tensor(members)
    for compressor, tolerance in (
        (TopK(density, size, value_bits, index_code), 1e-6),
        (Cocktail(mask, density, value_bits, block_size=16), 1e-6),
        (DCTTopK(size, density, value_bits), 1e-5),
    ):
        payload = compressor.compress(vector, key=key)
        error = compressor.decompress(payload, len(vector), key=key) - vector
        assert error.double().norm() <= vector.double().norm() * (1 + tolerance)


@pytest.mark.parametrize("compressor", representative([c for c in ALL if c.linear]))
@given(numel=st.integers(1, 60), key=keys)
def test_no_vector_exceeds_the_norm_bound(compressor: Compressor, numel: int, key: int) -> None:
    bound = compressor.norm_bound(numel)
    if bound == math.inf:
        return
    columns = [compressor.compress(e, key=key) for e in torch.eye(numel)]
    assert torch.linalg.matrix_norm(torch.stack(columns), ord=2) <= bound * (1 + 1e-5)


@every_compressor
def test_bad_vectors_and_payloads_are_refused(compressor: Compressor) -> None:
    for bad in (torch.zeros(2, 2), torch.zeros(3, dtype=torch.int64), torch.zeros(0)):
        with pytest.raises(ValueError, match="non-empty 1-D floating-point tensor"):
            compressor.compress(bad, key=0)
    payload = compressor.compress(gaussian(500), key=0)
    with pytest.raises(ValueError, match="500 elements"):
        compressor.decompress(payload[:-1], 500, key=0)
    with pytest.raises(ValueError, match="needs a contiguous float32 out"):
        compressor.decompress(payload, 500, key=0, out=torch.zeros(501))


@every_compressor
def test_a_payload_may_begin_anywhere_in_memory(compressor: Compressor) -> None:
    vector = torch.randn(100)
    payload = compressor.compress(vector, key=5).view(torch.uint8)
    moved = torch.cat([torch.zeros(1, dtype=torch.uint8), payload])[1:]
    expected = compressor.decompress(payload, 100, key=5)
    assert torch.equal(compressor.decompress(moved, 100, key=5), expected)


@pytest.mark.parametrize(
    ("payload", "numel", "told"),
    [
        (torch.zeros(1, 16), 16, "returned it, 1-D, got shape (1, 16)"),
        (b"", 16, "returned it, 1-D, got bytes"),
        (torch.zeros(16), 0, "a positive integer numel, got 0"),
        (torch.zeros(16), -1, "a positive integer numel, got -1"),
        (torch.zeros(16), 16.0, "a positive integer numel, got 16.0"),
        (torch.zeros(15), 16, "decompresses 16 elements from 64 bytes, got 60"),
    ],
)
def test_what_cannot_be_decompressed_is_told(payload: Any, numel: Any, told: str) -> None:
    with pytest.raises(ValueError, match=re.escape(told)):
        Identity().decompress(payload, numel, key=0)
