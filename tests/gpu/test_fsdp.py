"""FSDP2 on a GPU, over NCCL, on 4 ranks as 2 x 2."""

from typing import Any

import pytest
import torch

from tests.frameworks import hsdp
from tests.ranks import RanksOf


def shards(setup: hsdp.Setup, compressor: str) -> dict[str, dict[str, Any]]:
    found = {}
    for device in ("cuda", "cpu"):
        with torch.device(device):
            last = hsdp.gradients_of_steps(setup, compressor, 2, {})["shards"][-1]
        found[device] = {name: shard.cpu() for name, shard in last.items()}
    return found


@pytest.mark.parametrize("setup", [hsdp.hybrid, hsdp.both])
@pytest.mark.parametrize("compressor", ["identity", "topk", "sign", "count_sketch"])
def test_replicas_get_the_same_bits(
    nccl_ranks: RanksOf, compressor: str, setup: hsdp.Setup
) -> None:
    outcomes = nccl_ranks(4).run(shards, setup, compressor)
    for here, there in ((0, 2), (1, 3)):
        ours, theirs = (outcomes[rank]["cuda"] for rank in (here, there))
        assert list(ours) == list(theirs)
        assert all(torch.equal(ours[name], theirs[name]) for name in ours)
        for name, expected in outcomes[here]["cpu"].items():
            torch.testing.assert_close(ours[name], expected, rtol=1e-3, atol=1e-4)
