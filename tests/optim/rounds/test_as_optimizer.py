"""LocalRounds where PyTorch expects an optimizer: schedulers, hooks, checkpoints of rank 0."""

import copy
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn

from comm_hooks import ErrorFeedback, Exchange, Identity, TopK
from comm_hooks.checkpoints.rank_files import load_rank_files, save_rank_file
from comm_hooks.optim import (
    SAFL,
    DiLoCo,
    FedAMS,
    FedAvg,
    FedLAMB,
    LocalRounds,
    MuLoCo,
    SparseLoCo,
)
from tests.optim.rounds.problem import Arrays, make_parameters, set_gradients, values
from tests.optim.scenarios import RanksOf, rarely

K = 4


def make(momentum: float = 0.5) -> tuple[dict[str, nn.Parameter], LocalRounds]:
    parameters = make_parameters()
    inner = torch.optim.SGD(parameters.items(), lr=0.05, momentum=momentum)
    exchange = Exchange(TopK(density=0.05), ErrorFeedback(), min_numel=16)
    return parameters, LocalRounds(inner, exchange, local_steps=K, fragments=2)


def train(parameters: dict[str, nn.Parameter], rounds: Any, steps: range) -> None:
    for step in steps:
        set_gradients(parameters, step, dist.get_rank())
        rounds.step()


def same(first: Arrays, second: Arrays) -> bool:
    return all(np.array_equal(x, second[name]) for name, x in first.items())


@pytest.mark.parametrize("kind", [SAFL, FedAvg, FedAMS, FedLAMB, DiLoCo, MuLoCo, SparseLoCo])
def test_every_kind_is_an_optimizer(kind: type[LocalRounds]) -> None:
    parameters = make_parameters()
    memory = ErrorFeedback(decay=0.95) if kind is SparseLoCo else None
    rounds = kind(parameters.items(), Exchange(Identity(), memory), local_steps=K)  # type: ignore[call-arg,arg-type]
    assert isinstance(rounds, torch.optim.Optimizer)
    assert rounds.param_groups is rounds.inner.param_groups
    assert rounds.state is rounds.inner.state
    assert rounds.defaults is rounds.inner.defaults
    with pytest.raises(ValueError, match=f"{kind.__name__}: parameters cannot be added"):
        rounds.add_param_group({"params": [nn.Parameter(torch.zeros(1))]})


def hooked() -> tuple[list[str], bool]:
    parameters, rounds = make()
    calls: list[str] = []
    rounds.register_step_pre_hook(lambda optimizer, args, kwargs: calls.append("before"))
    rounds.register_step_post_hook(lambda optimizer, args, kwargs: calls.append("after"))
    rounds.register_state_dict_post_hook(lambda optimizer, state: {**state, "more": 1})
    rounds.register_load_state_dict_pre_hook(
        lambda optimizer, state: calls.append(f"load {state['more']}")
    )
    rounds.register_load_state_dict_post_hook(lambda optimizer: calls.append("loaded"))
    with torch.profiler.profile() as profile:
        train(parameters, rounds, range(2))
    rounds.load_state_dict(rounds.state_dict())
    names = {event.name for event in profile.events()}
    return calls, "Optimizer.step#LocalRounds.step" in names


def test_hooks_are_called_and_the_profiler_sees_steps(ranks_of: RanksOf) -> None:
    for calls, profiled in ranks_of(2).run(hooked):
        assert calls == [*["before", "after"] * 2, "load 1", "loaded"]
        assert profiled


def test_copies_are_refused() -> None:
    _, rounds = make()
    with pytest.raises(TypeError, match=r"cannot be copied or pickled: save state_dict"):
        copy.deepcopy(rounds)


def reloaded() -> bool:
    """What Accelerate does when it is given an optimizer changes nothing, at any time."""
    trained = []
    for often in (False, True):
        parameters, rounds = make()
        for step in range(3 * K):
            train(parameters, rounds, range(step, step + 1))
            if often:
                rounds.load_state_dict(rounds.state_dict())
        rounds.synchronize()
        trained.append(values(parameters))
    return same(*trained)


def test_loading_what_was_just_saved_changes_nothing(ranks_of: RanksOf) -> None:
    assert ranks_of(2).run(reloaded) == [True, True]


def moved_after() -> tuple[list[torch.dtype], bool]:
    """A model that is moved after its optimizer was made, as prepare() and setup() do."""
    parameters, rounds = make()
    twins = make_parameters()
    for p in (*parameters.values(), *twins.values()):
        p.data = p.data.double()
    inner = torch.optim.SGD(twins.items(), lr=0.05, momentum=0.5)
    exchange = Exchange(TopK(density=0.05), ErrorFeedback(), min_numel=16)
    expected = LocalRounds(inner, exchange, local_steps=K, fragments=2)
    for step in range(2 * K):
        for of, by in ((parameters, rounds), (twins, expected)):
            by.zero_grad()
            sum(((p - step - dist.get_rank()) ** 2).sum() for p in of.values()).backward()  # type: ignore[union-attr]
            by.step()
    with rounds.server_parameters():
        dtypes = [p.dtype for p in parameters.values()]
    return dtypes, same(values(parameters), values(twins))


def test_a_model_may_be_moved_after_the_optimizer_was_made(ranks_of: RanksOf) -> None:
    # Here to another dtype; to another device it is the same `.to`.
    for dtypes, alike in ranks_of(2).run(moved_after):
        assert dtypes == [torch.float64] * 2
        assert alike


def resume(folder: str, whose: str) -> tuple[bool, bool, bool, list[str]]:
    """Resume in the middle of a round where a framework has saved rank 0's model and optimizer."""
    parameters, rounds = make()
    train(parameters, rounds, range(K + 1))
    shared: list[Any] = [None]
    if dist.get_rank() == 0:
        shared = [({n: p.detach().clone() for n, p in parameters.items()}, rounds.state_dict())]
    dist.broadcast_object_list(shared)
    save_rank_file(rounds, folder)
    train(parameters, rounds, range(K + 1, 4 * K))
    rounds.synchronize()
    expected = values(parameters)

    model, state = shared[0]
    parameters, rounds = make()
    with torch.no_grad():
        for name, p in parameters.items():
            p.copy_(model[name])
    rounds.load_state_dict(state)
    memory = rounds.exchange.memory
    assert memory
    starts = values(parameters)
    with rounds.server_parameters():
        at_the_server = same(starts, values(parameters))
    has_own = bool(memory.state_dict()) and not at_the_server
    has_nothing = not memory.state_dict() and at_the_server
    if whose == "own":
        load_rank_files(rounds, folder)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        train(parameters, rounds, range(K + 1, 4 * K))
    rounds.synchronize()
    after = values(parameters)
    everyone: list[Any] = [None, None]
    dist.all_gather_object(everyone, after)
    # Rank 0's own is for rank 0 only: taken twice it would be counted twice.
    loaded = has_own if dist.get_rank() == 0 else has_nothing
    return loaded, same(after, expected), same(*everyone), [str(w.message) for w in caught]


@pytest.mark.parametrize("whose", ["own", "rank 0's"])
def test_what_frameworks_save_of_rank_0_serves_the_others_too(
    ranks_of: RanksOf, tmp_path: Any, whose: str
) -> None:
    for rank, report in enumerate(ranks_of(2).run(resume, str(tmp_path), whose)):
        loaded, exact, agree, messages = report
        assert loaded
        assert agree
        assert exact == (whose == "own")
        if whose == "own" or rank == 0:
            assert not messages
        else:
            assert len(messages) == 1
            assert "this rank goes on from the state that rank 0 saved" in messages[0]


def owed(rounds: LocalRounds) -> Arrays:
    """Return what the mean over ranks has yet to receive from this one: residual and progress."""
    state = rounds.state_dict()
    private, released = state["rounds"]["private"], state["rounds"]["released"]
    result = {}
    for name, start in released["model"].items():
        own = private["own"].get(name, start)
        row = state["memory"].get(name)
        result[name] = (start - own).flatten().numpy() + (0 if row is None else row.numpy())
    return result


def mean_over_ranks(of_one: Arrays) -> Arrays:
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, of_one)
    return {name: np.mean([each[name] for each in everyone], axis=0) for name in of_one}


def save_in_a_round(folder: str) -> tuple[Arrays, Arrays]:
    parameters, rounds = make()
    train(parameters, rounds, range(K + 1))
    save_rank_file(rounds, folder)
    owed_by_all = mean_over_ranks(owed(rounds))
    with rounds.server_parameters():
        return owed_by_all, values(parameters)


def go_on(folder: str) -> tuple[Arrays, Arrays, Arrays, list[str]]:
    parameters, rounds = make()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        load_rank_files(rounds, folder)
        with rounds.server_parameters():
            begun, owed_by_all = values(parameters), mean_over_ranks(owed(rounds))
        train(parameters, rounds, range(K + 1, 3 * K))
    rounds.synchronize()
    return owed_by_all, begun, values(parameters), [str(w.message) for w in caught]


@pytest.mark.parametrize("ranks", [3, *rarely(1)])
def test_another_number_of_ranks_goes_on_at_the_shared_model(
    ranks_of: RanksOf, tmp_path: Any, ranks: int
) -> None:
    (expected, shared), _ = ranks_of(2).run(save_in_a_round, str(tmp_path))
    results = ranks_of(ranks).run(go_on, str(tmp_path))
    for owed_by_all, begun, end, messages in results:
        assert not [m for m in messages if "goes on from the state" in m]
        assert same(begun, shared)
        assert same(end, results[0][2])
        assert not same(end, begun)
        for name, value in expected.items():
            np.testing.assert_allclose(owed_by_all[name], value, atol=1e-6)
    assert any(np.abs(value).max() > 0 for value in expected.values())


def loads_files_of_two_steps(folder: str) -> str:
    """Rank 1's file is of the next local step, in which nothing was exchanged."""
    parameters, rounds = make()
    train(parameters, rounds, range(2 * K))
    save_rank_file(rounds, folder)
    train(parameters, rounds, range(2 * K, 2 * K + 1))
    save_rank_file(rounds, f"{folder}/next")
    if dist.get_rank() == 1:
        Path(folder, "next", "rank1.pt").rename(Path(folder, "rank1.pt"))
    dist.barrier()
    _, rounds = make()
    try:
        load_rank_files(rounds, folder)
    except ValueError as error:
        return str(error)
    return ""


def test_files_of_two_local_steps_are_not_one_checkpoint(ranks_of: RanksOf, tmp_path: Any) -> None:
    for message in ranks_of(2).run(loads_files_of_two_steps, str(tmp_path)):
        assert "rank1.pt is of another checkpoint than rank 0's" in message


def load_what_rank_0_saved(folder: str) -> tuple[Arrays, list[str]]:
    """As frameworks do, which keep one optimizer for all ranks."""
    parameters, rounds = make()
    state = torch.load(f"{folder}/rank0.pt", weights_only=True)
    rounds.load_state_dict(state["state"])
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        begun = values(parameters)
        train(parameters, rounds, range(K + 1, 3 * K))
    return begun, [str(w.message) for w in caught]


def test_one_state_for_another_number_of_ranks(ranks_of: RanksOf, tmp_path: Any) -> None:
    (_, shared), _ = ranks_of(2).run(save_in_a_round, str(tmp_path))
    for begun, messages in ranks_of(3).run(load_what_rank_0_saved, str(tmp_path)):
        assert same(begun, shared)
        assert len([m for m in messages if "goes on from the state that rank 0 saved" in m]) == 1
