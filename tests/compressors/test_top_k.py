"""TopK: what it sends, in how many bits, and that nothing makes the error longer."""

import pytest
import torch
from hypothesis import strategies as st

from comm_hooks import Cocktail, Compressor, DCTTopK, TopK
from comm_hooks.compressors import sparse
from comm_hooks.randomness import Draw
from comm_hooks.wire.index_codes import IndexCode
from comm_hooks.wire.values import VALUE_BITS

values = st.floats(-1e6, 1e6, width=32).map(lambda x: x if abs(x) > 1e-15 else 0.0)


def through(compressor: TopK, vector: torch.Tensor) -> torch.Tensor:
    return compressor.decompress(compressor.compress(vector, key=0), vector.numel(), key=0)


@pytest.mark.parametrize(
    ("value_bits", "per_kept"), [(1, 9.03), (2, 10.03), (3, 11.03), (4, 12.5), (16, 24), (32, 40)]
)
@pytest.mark.parametrize(("index_code", "saved"), [("elias_fano", 0), ("rice", 0.45)])
def test_bits_per_kept_element(
    value_bits: int, per_kept: float, index_code: IndexCode, saved: float
) -> None:
    """64 of 4096: the index, the value, and its share of the levels."""
    compressor = TopK(density=1 / 64, value_bits=value_bits, index_code=index_code)
    assert 8 * compressor.payload_nbytes(3200 * 4096) <= 3200 * 64 * (per_kept - saved)


@pytest.mark.parametrize("value_bits", VALUE_BITS)
def test_the_largest_of_every_block_arrive_with_their_signs(value_bits: int) -> None:
    vector = torch.randn(3, 1000, generator=torch.Generator().manual_seed(0))
    kept = through(TopK(0.05, 1000, value_bits), vector.flatten()).view(3, 1000)
    # Below half a step of 4 bits a value is rounded to zero, which no value kept here is.
    expected = torch.zeros_like(vector)
    places = vector.abs().topk(50, dim=1).indices
    expected.scatter_(1, places, vector.gather(1, places))
    assert torch.equal(kept.sign(), expected.sign())


@pytest.mark.parametrize("value_bits", VALUE_BITS)
def test_padding_sends_nothing(value_bits: int) -> None:
    """Ten elements in blocks of three: the last block is one element and two of padding."""
    vector = torch.tensor([1.0, 2.0, 3.0] * 3 + [-6.0])
    top_k = TopK(density=1.0, block_size=3, value_bits=value_bits)
    padded = through(top_k, torch.nn.functional.pad(vector, (0, 2)))
    assert torch.equal(through(top_k, vector), padded[:10])
    assert padded[9] < 0


@pytest.mark.parametrize("overlap", [0.0, 0.5, 1.0])
@pytest.mark.parametrize("value_bits", [1, 32])
@pytest.mark.parametrize("ranks", [1, 2, 5, sparse._RANKS_AT_ONCE + 1])
def test_sums_are_divided_by_how_many_ranks_sent_an_element(
    overlap: float, value_bits: int, ranks: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sparse, "_ENTRIES_AT_ONCE", 1)
    top_k = TopK(0.3, 100, value_bits, "rice", overlap)
    vectors = torch.randn(ranks, 2, 500, generator=torch.Generator().manual_seed(1))
    vectors[:, :, :40] += 2.0  # what several ranks send
    draw = Draw((3, 4))
    payloads = torch.stack([top_k.encode(rows, draw) for rows in vectors]).view(torch.uint8)
    decoded = torch.zeros_like(vectors)
    for out, octets in zip(decoded, payloads, strict=True):
        top_k.decode(out, octets, draw)
    senders = (decoded != 0).sum(0)
    assert senders.max() == ranks
    total = torch.full((2, 500), torch.nan)
    top_k.decode_sum(total, payloads, draw, alpha=0.25)
    torch.testing.assert_close(total, 0.25 * decoded.sum(0) / senders.clamp(min=1) ** overlap)


def test_of_what_does_not_fit_nothing_is_lost() -> None:
    """Blocks whose places take more room than random ones: some wait in the rest."""
    top_k = TopK(density=1 / 64, value_bits=1, index_code="rice")
    vector = torch.zeros(40, 4096)
    vector[:, :63] = 1.0
    vector[:, -1] = -1.0
    rest = vector.reshape(1, -1).clone()
    payload = top_k.extract(rest, Draw((0,)))
    arrived = torch.zeros_like(rest)
    top_k.decode(arrived, payload, Draw((0,)))
    waiting = int((arrived == 0).sum() - (vector == 0).sum())
    assert 100 < waiting < 1000
    torch.testing.assert_close(rest + arrived, vector.reshape(1, -1))


@pytest.mark.parametrize(
    "compressor",
    [
        *(TopK(density=0.1, block_size=64, value_bits=bits) for bits in VALUE_BITS),
        TopK(density=0.1, block_size=64, value_bits=1, index_code="rice"),
        Cocktail(mask=0.5),
        DCTTopK(chunk=8, density=0.1),
    ],
    ids=repr,
)
def test_with_error_feedback_everything_arrives_in_the_end(compressor: Compressor) -> None:
    """Sent over and over, a vector's residual settles, so the mean of what was sent approaches it.

    A residual that grew with the steps, as that of sketches does, would double in each half.
    """
    vector, residual = torch.randn(300, generator=torch.Generator().manual_seed(0)), 0.0
    norms = []
    for step in range(120):
        total = residual + vector
        payload = compressor.compress(total, key=step)
        residual = total - compressor.decompress(payload, 300, key=step)
        norms.append(residual.norm() / vector.norm())
    assert max(norms[60:]) <= 1.25 * max(norms[:60])
