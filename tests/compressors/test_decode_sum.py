"""What all ranks sent is added up as if it were decompressed rank after rank."""

import pytest
import torch

from comm_hooks import Compressor, Sign
from comm_hooks.compressors import sparse
from comm_hooks.randomness import Draw
from tests.compressors.catalog import ALL


@pytest.mark.parametrize("ranks", [1, 3, sparse._RANKS_AT_ONCE + 1])
@pytest.mark.parametrize("compressor", [*ALL, Sign(block_size=12)], ids=repr)
@pytest.mark.parametrize("entries_at_once", [1, 1 << 15])
def test_sum_over_ranks(
    compressor: Compressor, ranks: int, entries_at_once: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Bit for bit: the mean must be the same on ranks that compute it in one way or the other."""
    monkeypatch.setattr(sparse, "_ENTRIES_AT_ONCE", entries_at_once)
    generator = torch.Generator().manual_seed(0)
    keys, numel = [3, 4], 500
    vectors = torch.randn(ranks, 2, numel, generator=generator)
    vectors[0, 0, 7:] = 0
    payloads = torch.stack(
        [
            compressor.encode(rows, Draw(keys, rank, ranks)).view(torch.uint8)
            for rank, rows in enumerate(vectors)
        ]
    )
    # In a message of several parts a part's payloads are not contiguous.
    message = torch.nn.functional.pad(payloads.flatten(1), (16, 8))
    payloads = message[:, 16:-8].unflatten(1, (2, -1))
    expected = torch.empty(2, numel)
    for rank, octets in enumerate(payloads):
        draw = Draw(keys, rank, ranks)
        compressor.decode(expected, octets, draw, alpha=1 / ranks, add=rank > 0)
    out = torch.full((2, numel), torch.nan)
    compressor.decode_sum(out, payloads, Draw(keys, 0, ranks), alpha=1 / ranks)
    assert torch.equal(out, expected)
