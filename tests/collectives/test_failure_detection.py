"""Ranks that mean different collectives get an error, not a process that gloo has ended."""

import json
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from comm_hooks import ConfigMismatchError, ErrorFeedback, Exchange, Identity, PeerError
from comm_hooks.collectives.failure_detection import progress_of
from comm_hooks.collectives.requests import AllGatherObject
from comm_hooks.collectives.store import StoreGather
from comm_hooks.collectives.torch_distributed import TorchDistributed
from tests.ranks import CONTEXT, RanksOf


def short_lived() -> Any:
    """Return a group of all ranks that gives up soon, but not on a rank that is only slow."""
    return dist.new_group(timeout=timedelta(seconds=3))


def told(function: Callable[[], object]) -> str:
    try:
        function()
    except PeerError as error:
        return str(error)
    return "nothing"


def gather(values: list[Any]) -> list[Any]:
    transport = TorchDistributed(dist.new_group())
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


def test_a_rank_that_compares_settings_by_itself_is_named(ranks_of: RanksOf) -> None:
    for message in ranks_of(3).run(compare_alone):
        assert "rank 1 for a comparison of settings" in message
        assert "for an all-reduce of" in message


def compare_different_things() -> str:
    """Make the exchange anew on rank 1, while rank 0 gives its own another tensor."""
    group = dist.new_group()
    exchange = Exchange(Identity(), process_group=group)
    exchange.average_({"weight": torch.ones(4, 4)})
    if dist.get_rank() == 1:
        exchange = Exchange(Identity(), process_group=group)
    return told(lambda: exchange.average_({"bias": torch.ones(4)}))


def test_settings_are_not_compared_with_tensors(ranks_of: RanksOf) -> None:
    for message in ranks_of(2).run(compare_different_things):
        compared = "rank 0 for a comparison of tensors, rank 1 for a comparison of settings"
        assert f"ranks waited for different things: {compared}" in message


class Broken(ErrorFeedback):
    def active(self, norms: torch.Tensor) -> torch.Tensor:
        raise LookupError("broken")


def go_on_after_failures() -> list[float]:
    """Fail on all ranks in every other round; rank 1 is the last to come to the next one."""
    exchange = Exchange(Identity(), process_group=dist.new_group())
    means = []
    for step in range(3):
        with pytest.raises(LookupError, match="broken"):
            exchange.average_({f"lost {step}": torch.ones(40, 40)}, memory=Broken())
        time.sleep(0.1 * dist.get_rank())
        tensor = torch.full((40, 40), float(dist.get_rank()))
        exchange.average_({f"weight {step}": tensor})
        means.append(tensor.mean().item())
    return means


def test_a_failure_that_all_have_left_behind_is_not_taken_for_the_next(ranks_of: RanksOf) -> None:
    assert ranks_of(2).run(go_on_after_failures) == [[0.5] * 3] * 2


def test_a_rank_that_fails_after_it_has_sent_its_value_is_not_absent() -> None:
    store = dist.HashStore()
    store.set("0", "value")

    def sends_and_fails(ranks: list[int], epoch: int) -> bool:
        store.set("1", "value")
        return True

    failures = SimpleNamespace(has_failed=sends_and_fails)
    gather: Any = SimpleNamespace(
        _store=store, _ranks=[0, 1], _timeout_seconds=60.0, _failures=failures
    )
    StoreGather._wait(gather, ["0", "1"], 0)


def compare_without_rank_2() -> Any:
    """Make a group of which nothing is said, in a world that was given a timeout."""
    dist.distributed_c10d._set_pg_timeout(timedelta(seconds=2), dist.group.WORLD)
    group = dist.new_group()
    begin = time.monotonic()
    if dist.get_rank() == 2:
        return None
    exchange = Exchange(Identity(), process_group=group)
    message = told(lambda: exchange.average_({"weight": torch.ones(40, 40)}))
    return message, time.monotonic() - begin


@pytest.mark.slow
def test_a_rank_that_is_not_there_is_waited_for_as_the_default_group_says(
    ranks_of: RanksOf,
) -> None:
    """All other groups, those of a device mesh among them, have half an hour unless told."""
    ranks = ranks_of(3)
    *others, _ = ranks.run(compare_without_rank_2)
    ranks.close()
    for message, seconds in others:
        assert "rank 2 did not take part" in message
        assert seconds < 30


def compare_in_pairs() -> str:
    """Exchange between ranks 0 and 2, and 1 and 3, which has other settings."""
    rank = dist.get_rank()
    group, _ = dist.new_subgroups_by_enumeration([[0, 2], [1, 3]])
    exchange = Exchange(Identity(), process_group=group, seed=int(rank == 3))
    try:
        exchange.average_({"weight": torch.ones(40, 40)})
    except ConfigMismatchError as error:
        return str(error)
    return ""


def test_ranks_of_a_group_are_called_as_users_know_them(ranks_of: RanksOf) -> None:
    first, second, third, fourth = ranks_of(4).run(compare_in_pairs)
    assert first == third == ""
    assert second == fourth
    assert "seed is 0 on rank 1, 1 on rank 3" in second


def begin(rank: int, ranks: int, file: Path, members: list[int] | None) -> torch.Tensor | None:
    """Join a new world; exchange in the group of some of its ranks, None for all of them."""
    timeout = timedelta(seconds=20)
    url = f"file://{file}"
    dist.init_process_group("gloo", url, timeout, rank=rank, world_size=ranks)
    group = None if members is None else dist.new_group(members)
    mean = None
    if members is None or rank in members:
        exchange = Exchange(Identity(), process_group=group)
        vectors = {"weight": torch.full((4,), float(rank))}
        exchange.average_(vectors)
        mean = vectors["weight"]
    dist.barrier()
    dist.destroy_process_group()
    return mean


def live_through(rank: int, folder: Path, groups: list[tuple[int, list[int] | None]]) -> None:
    """Join worlds, one after the other, as far as this rank is in them."""
    for index, (ranks, members) in enumerate(groups):
        if rank < ranks:
            mean = begin(rank, ranks, folder / str(index), members)
            own = range(ranks) if members is None else members
            assert mean is None or mean.tolist() == [sum(own) / len(own)] * 4


@pytest.mark.parametrize(
    "groups",
    [
        [(2, None), (3, None)],
        [(3, [0, 2]), (3, [1, 2]), (3, [0, 1])],
        [(3, None), (2, None), (3, None), (3, [1, 2])],
    ],
)
def test_ranks_may_have_been_in_other_groups_of_the_same_name(
    groups: list[tuple[int, list[int] | None]], tmp_path: Path
) -> None:
    arguments = [(rank, tmp_path, groups) for rank in range(3)]
    processes = [CONTEXT.Process(target=live_through, args=each) for each in arguments]
    for process in processes:
        process.start()
    for process in processes:
        process.join(60)
        process.kill()
    assert [process.exitcode for process in processes] == [0, 0, 0]


def remade(file: Path) -> list[tuple[str, int]]:
    store = dist.FileStore(str(file), 1)
    found = []
    for _ in range(2):
        dist.init_process_group("gloo", store=store, rank=0, world_size=1)
        assert dist.group.WORLD is not None
        progress = progress_of(dist.group.WORLD)
        assert progress_of(dist.group.WORLD) is progress
        found.append((progress.name, progress.epoch))
        progress.fail(progress.epoch)
        dist.destroy_process_group()
    return found


def test_messages_of_an_earlier_group_in_the_same_store_are_not_read(tmp_path: Path) -> None:
    with ProcessPoolExecutor(1, mp_context=CONTEXT) as pool:
        (first, _), (second, epoch) = pool.submit(remade, tmp_path / "store").result()
    assert first != second
    assert epoch == 0
