"""The compressor that CONTRIBUTING shows does whatever those of the library do."""

from typing import Any

import pytest
import torch

from comm_hooks import Compressor, ErrorFeedback, Exchange
from comm_hooks.collectives import Simulated
from tests.docs.pages import ROOT, Page

RANKS, STEPS = 4, 6


def every_other() -> Compressor:
    (block,) = (b for b in Page(ROOT / "CONTRIBUTING.md").blocks if "EveryOther" in b.text)
    namespace: dict[str, Any] = {"torch": torch, "__name__": __name__}
    exec(block.text.partition("state = register")[0], namespace)
    compressor: Compressor = namespace["EveryOther"]()
    return compressor


@pytest.mark.parametrize("granularity", ["parameter", "bucket"])
@pytest.mark.parametrize("collective", ["all_reduce", "all_gather", "sharded", "hierarchical"])
def test_nothing_is_lost_in_any_collective(collective: Any, granularity: Any) -> None:
    world = Simulated(RANKS)
    settings: dict[str, Any] = {"min_numel": 1, "granularity": granularity}
    if collective == "hierarchical":
        settings["ranks_per_node"] = 2
    exchanges = [
        Exchange(every_other(), ErrorFeedback(), collective, **settings, transport=transport)
        for transport in world
    ]
    true, arrived = torch.zeros(2, 40)
    for step in range(STEPS):
        own = torch.randn(RANKS, 40, 1, generator=torch.Generator().manual_seed(step))
        tensors = [{"w": vector.clone()} for vector in own]
        world.run([e.round(t) for e, t in zip(exchanges, tensors, strict=True)])
        assert all(torch.equal(t["w"], tensors[0]["w"]) for t in tensors)
        true += own.mean(0).flatten()
        arrived += tensors[0]["w"].flatten()
    # Shards are of 10 elements, so that of a shard, too, those at even places arrive.
    torch.testing.assert_close(arrived[::2], true[::2])
    assert not arrived[1::2].any()
    states = [exchange.state_dict()["memory"]["w"] for exchange in exchanges]
    if collective != "hierarchical":
        torch.testing.assert_close(torch.stack(states).mean(0)[1::2], true[1::2])
