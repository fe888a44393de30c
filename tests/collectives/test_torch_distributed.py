"""The transport over gloo, and that stats() counts what really crosses an interface."""

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist

from comm_hooks.collectives import Simulated, TorchDistributed
from comm_hooks.collectives.requests import AllGather, AllReduce, AllToAll, Request
from tests.ranks import Ranks

RanksOf = Callable[[int], Ranks]


def requests(rank: int, ranks: int) -> list[Request]:
    return [
        AllReduce(torch.arange(5.0) + rank),
        AllGather(torch.full((3,), rank, dtype=torch.uint8)),
        AllToAll(torch.arange(ranks * 2, dtype=torch.uint8).view(ranks, 2) + 10 * rank),
    ]


def replies(asynchronous: bool, in_subgroup: bool) -> list[torch.Tensor]:
    group = None
    if in_subgroup:
        group = dist.new_group(list(range(1, dist.get_world_size())))
        if dist.get_rank() == 0:
            return []
    transport = TorchDistributed(group)
    assert transport.rank == dist.get_rank() - in_subgroup
    own = requests(transport.rank, transport.world_size)
    if asynchronous:
        return [transport.start(request).wait() for request in own]
    return [transport.perform(request) for request in own]


@pytest.mark.parametrize("asynchronous", [False, True])
@pytest.mark.parametrize("in_subgroup", [False, True])
def test_replies_equal_those_of_a_simulated_world(
    ranks_of: RanksOf, asynchronous: bool, in_subgroup: bool
) -> None:
    actual = ranks_of(4).run(replies, asynchronous, in_subgroup)[in_subgroup:]
    ranks = len(actual)
    for index in range(3):
        expected = Simulated(ranks)._perform([requests(r, ranks)[index] for r in range(ranks)])
        for rank in range(ranks):
            assert torch.equal(actual[rank][index], expected[rank])


def test_without_a_process_group_the_error_says_what_to_do() -> None:
    with pytest.raises(ValueError, match=r"call torch\.distributed\.init_process_group\(\)"):
        TorchDistributed()


def can_unshare() -> bool:
    if not shutil.which("unshare"):
        return False
    return subprocess.run(["unshare", "-n", "true"], capture_output=True).returncode == 0


@pytest.mark.skipif(not can_unshare(), reason="needs `unshare -n`, which needs root")
@pytest.mark.parametrize("ranks", [2, 4])
def test_stats_equal_what_crosses_the_interface(ranks: int) -> None:
    """Ranks in a network namespace of their own, whose loopback interface counts every byte."""
    script = os.path.join(os.path.dirname(__file__), "measure_traffic.py")
    done = subprocess.run(
        ["unshare", "-n", sys.executable, script, str(ranks)],
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    for line in done.stdout.splitlines():
        report = json.loads(line)
        # Headers, acknowledgements and gloo's own messages are a percent or two of megabytes.
        assert report["counted"] <= report["crossed"] <= 1.04 * report["counted"], report


LEAVES_EARLY = """
import time
import torch
import torch.distributed as dist
from comm_hooks.collectives import TorchDistributed
from comm_hooks.collectives.requests import AllReduce

dist.init_process_group("gloo", init_method="tcp://127.0.0.1:0", rank=0, world_size=1)
# Stands for a thread that the system has not scheduled for a moment: it needs the lock afterwards.
TorchDistributed().start(AllReduce(torch.ones(3))).then(lambda _: time.sleep(0.03))
"""


def test_a_script_that_ends_while_gloo_still_works_is_not_aborted() -> None:
    done = subprocess.run([sys.executable, "-c", LEAVES_EARLY], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
