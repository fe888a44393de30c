"""DeMo's mean over the ranks that sent a coefficient, on every route; see test_references."""

from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn

from comm_hooks import ErrorFeedback, Exchange
from comm_hooks.compressors.dct import DCTTopK
from comm_hooks.optim.published import demo
from comm_hooks.optim.published.demo import DeMo
from comm_hooks.randomness import Draw
from tests.optim.scenarios import RanksOf

CHUNK = 8


def first_signs(counts_senders: bool, **exchange: Any) -> np.ndarray:
    """The signs of a first step, where a fifth of the gradient's variance is shared."""
    torch.manual_seed(dist.get_rank())
    noise = torch.randn(256, 256)
    shared = torch.randn(256, 256, generator=torch.Generator().manual_seed(99))
    weight = nn.Parameter(torch.zeros(256, 256))
    settings = {"collective": "all_gather", **exchange}
    optimizer = DeMo([weight], Exchange(DCTTopK(), ErrorFeedback(decay=0.999), **settings), lr=1.0)
    if not counts_senders:
        optimizer._compress = True
    weight.grad = shared + 2 * noise
    optimizer.step()
    return -weight.detach().numpy()


def test_the_mean_of_senders_is_one() -> None:
    """Also in size, which signs do not see."""
    compressor = demo._MeanOfSenders(CHUNK, 1 / CHUNK**2, 32)
    vectors = [torch.ones(1, CHUNK**2), 3 * torch.ones(1, CHUNK**2), torch.zeros(1, CHUNK**2)]
    payloads = torch.stack([compressor.encode(v, Draw((0,), 0, 3)) for v in vectors])
    out = torch.full((1, CHUNK**2), 7.0)
    compressor.decode_sum(out, payloads, Draw((0,), 0, 3), alpha=1 / 3)
    torch.testing.assert_close(out, 2 * torch.ones(1, CHUNK**2))


@pytest.mark.slow
@pytest.mark.parametrize("collective", ["sharded", "hierarchical"])
def test_senders_are_counted_on_every_route(ranks_of: RanksOf, collective: str) -> None:
    options: dict[str, Any] = {"collective": collective}
    if collective == "hierarchical":
        options["ranks_per_node"] = 2
    signs = [ranks_of(4).run(partial(first_signs, m, **options)) for m in (True, False)]
    for replicas in signs:
        assert all(np.array_equal(replica, replicas[0]) for replica in replicas)
    assert 0.5 < (signs[0][0] == signs[1][0]).mean() < 1
