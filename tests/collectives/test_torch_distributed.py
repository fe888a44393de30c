"""The transport over gloo, and that stats() counts what really crosses an interface."""

import json
import os
import shutil
import subprocess
import sys
from functools import cache
from typing import Any

import pytest
import torch
import torch.distributed as dist

from comm_hooks import ErrorFeedback, Exchange, Sign, TopK
from comm_hooks.collectives import Simulated, TorchDistributed
from comm_hooks.collectives.requests import AllGather, AllReduce, AllToAll, Group, Request, ask
from tests.ranks import RanksOf


def requests(rank: int, ranks: int, group: Group | None = None) -> list[Request]:
    """One of each kind, the last of which is never the only one of a round."""
    members = len(group.members(rank, ranks)) if group else ranks
    return [
        AllReduce(torch.arange(5.0) + rank, group=group),
        AllGather(torch.full((3,), rank, dtype=torch.uint8), group=group),
        AllToAll(
            torch.arange(members * 2, dtype=torch.uint8).view(members, 2) + 10 * rank, group=group
        ),
    ]


def replies(asynchronous: bool, in_subgroup: bool, part: Group | None) -> list[torch.Tensor]:
    group = None
    if in_subgroup:
        group = dist.new_group(list(range(1, dist.get_world_size())))
        if dist.get_rank() == 0:
            return []
    transport = TorchDistributed(group)
    assert transport.rank == dist.get_rank() - in_subgroup
    own = requests(transport.rank, transport.world_size, part)
    if asynchronous:
        return [transport.run_async(ask(request)).wait() for request in own]
    return [transport.perform(request) for request in own]


def use_what_was_destroyed() -> list[str]:
    group = dist.new_group()
    exchange = Exchange(TopK(density=0.5), ErrorFeedback(), process_group=group)
    exchange.average_({"weight": torch.ones(8, 8)})
    dist.destroy_process_group(group)
    errors = []
    for use in (lambda: exchange.average_({"weight": torch.ones(8, 8)}), exchange.state_dict):
        with pytest.raises(ValueError, match="has been destroyed") as error:
            use()
        errors.append(str(error.value))
    return errors


def test_a_group_that_was_destroyed_is_called_so(ranks_of: RanksOf) -> None:
    for first, second in ranks_of(2).run(use_what_was_destroyed):
        assert first == second
        assert "make new optimizers and hooks" in first


@pytest.mark.parametrize("asynchronous", [False, True])
@pytest.mark.parametrize(
    ("ranks", "in_subgroup", "part"),
    [
        (3, False, None),
        (3, True, None),
        (4, False, Group("node", 2)),
        (4, False, Group("across", 2)),
        (4, False, Group("across", 4)),
    ],
)
def test_replies_equal_those_of_a_simulated_world(
    ranks_of: RanksOf, ranks: int, in_subgroup: bool, part: Group | None, asynchronous: bool
) -> None:
    actual = ranks_of(ranks).run(replies, asynchronous, in_subgroup, part)[in_subgroup:]
    ranks = len(actual)
    for index in range(3):
        asked = [requests(rank, ranks, part)[index] for rank in range(ranks)]
        expected = Simulated(ranks)._perform(asked)
        for rank in range(ranks):
            assert torch.equal(actual[rank][index], expected[rank])


def outside() -> str:
    group = dist.new_group([0])
    if dist.get_rank() == 0:
        return ""
    with pytest.raises(ValueError, match="rank 1 is not in the process group") as caught:
        Exchange(TopK(density=0.5), process_group=group).average_({"w": torch.ones(64, 64)})
    return str(caught.value)


def test_a_rank_outside_of_the_group_is_told(ranks_of: RanksOf) -> None:
    inside, other = ranks_of(2).run(outside)
    assert not inside
    assert other


def test_without_a_process_group_the_error_says_what_to_do() -> None:
    with pytest.raises(ValueError, match=r"call torch\.distributed\.init_process_group\(\)"):
        TorchDistributed()


LEAVES_EARLY = """
import time
import torch
import torch.distributed as dist
from comm_hooks.collectives import TorchDistributed

dist.init_process_group("gloo", init_method="tcp://127.0.0.1:0", rank=0, world_size=1)
transport = TorchDistributed()
# Stands for a thread that the system has not scheduled for a moment: it needs the lock afterwards.
work = dist.all_reduce(torch.ones(3), async_op=True)
work.get_future().then(lambda _: time.sleep(0.03))
"""


def test_a_script_that_ends_while_gloo_still_works_is_not_aborted() -> None:
    done = subprocess.run([sys.executable, "-c", LEAVES_EARLY], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def can_unshare() -> bool:
    if not shutil.which("unshare"):
        return False
    return subprocess.run(["unshare", "-n", "true"], capture_output=True).returncode == 0


@cache
def traffic(ranks: int) -> list[dict[str, Any]]:
    """Run ranks in a network namespace of their own, whose loopback interface counts every byte."""
    script = os.path.join(os.path.dirname(__file__), "measure_traffic.py")
    done = subprocess.run(
        ["unshare", "-n", sys.executable, script, str(ranks)],
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]


needs_unshare = pytest.mark.skipif(not can_unshare(), reason="needs `unshare -n`, which needs root")


@pytest.mark.slow
@needs_unshare
@pytest.mark.parametrize("ranks", [2, 4])
def test_stats_equal_what_crosses_the_interface(ranks: int) -> None:
    for report in traffic(ranks):
        # Headers, and acknowledgements, of which a busy machine sends more.
        assert report["counted"] <= report["crossed"] <= 1.1 * report["counted"], report


@pytest.mark.slow
@needs_unshare
def test_what_a_rank_sends_does_not_grow_with_the_ranks_where_owners_average() -> None:
    """Of N ranks each sends (N - 1) / N of a payload to the owners, and as much of the means.

    That is one payload with two ranks, 1.5 with four, and never two.  A gather takes N - 1.
    """
    sent = {
        ranks: {report["case"]: report["crossed"] / ranks for report in traffic(ranks)}
        for ranks in (2, 4)
    }
    growth = {case: sent[4][case] / sent[2][case] for case in sent[2]}
    (sharded,) = (ratio for case, ratio in growth.items() if case.endswith("sharded"))
    assert sharded == pytest.approx(1.5, rel=0.1)
    assert growth[f"{Sign()} all_gather"] == pytest.approx(3.0, rel=0.1)
