"""Ranks that mean different collectives get an error, not a process that gloo has ended."""

import json
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist

from comm_hooks import Exchange, Identity, PeerError
from comm_hooks.collectives.requests import AllGather, AllGatherObject
from comm_hooks.collectives.torch_distributed import TorchDistributed
from tests.ranks import Ranks

RanksOf = Callable[[int], Ranks]


def short_lived() -> Any:
    """Return a group of all ranks that gives up soon."""
    return dist.new_group(timeout=timedelta(seconds=1))


def told(function: Callable[[], object]) -> str:
    try:
        function()
    except PeerError as error:
        return str(error)
    return "nothing"


def gather(values: list[Any]) -> list[Any]:
    transport = TorchDistributed(short_lived())
    own = values[dist.get_rank()]
    return [transport.perform(AllGatherObject(own, may_be_alone=True)) for _ in range(3)]


@pytest.mark.parametrize("values", [[{"a": 1}] * 3, [{"a": 1}, {"a": 2}, {"a": 1}], [[], 0, None]])
def test_everybody_reads_what_all_say(ranks_of: RanksOf, values: list[Any]) -> None:
    # JSON is all that crosses.
    assert values == json.loads(json.dumps(values))
    assert ranks_of(3).run(gather, values) == [[values] * 3] * 3


def compare_alone() -> str:
    """Make the exchange anew on rank 1; the others go on."""
    group, tensor = short_lived(), torch.ones(40, 40)
    exchange = Exchange(Identity(), process_group=group)
    exchange.average_({"weight": tensor})
    if dist.get_rank() == 1:
        exchange = Exchange(Identity(), process_group=group)
    return told(lambda: exchange.average_({"weight": tensor}))


@pytest.mark.parametrize("ranks", [2, 3])
def test_a_rank_that_compares_settings_by_itself_is_named(ranks_of: RanksOf, ranks: int) -> None:
    for message in ranks_of(ranks).run(compare_alone):
        assert "rank 1 for a comparison of settings" in message
        assert "for an all-reduce of" in message


def mean_different_sizes() -> str:
    transport = TorchDistributed(short_lived())
    payload = torch.zeros(8 if dist.get_rank() else 800, dtype=torch.uint8)
    return told(lambda: transport.perform(AllGather(payload)))


def test_messages_of_different_sizes_do_not_meet(ranks_of: RanksOf) -> None:
    sizes = "rank 0 for an all-gather of 800 bytes, rank 1 for an all-gather of 8 bytes"
    for message in ranks_of(2).run(mean_different_sizes):
        assert f"ranks waited for different things: {sizes}" in message
