"""An exchange is not taken for another one: of an equal model, of another run, in another order."""

import copy
import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from comm_hooks import ConfigMismatchError, ErrorFeedback, Exchange, PayloadError, Sign, register
from comm_hooks.checkpoints.distributed_checkpoint import RankStates
from comm_hooks.checkpoints.rank_files import load_rank_files, save_rank_file
from comm_hooks.collectives import Simulated, Transport, run_ranks
from comm_hooks.optim import LocalRounds, LocalVarianceAdam, low_communication
from tests.ranks import RanksOf

Make = Callable[[Any, Transport | None], Any]


def adam(named: Any, transport: Transport | None = None) -> Any:
    exchange = Exchange(Sign(), ErrorFeedback(), min_numel=16, transport=transport)
    return LocalVarianceAdam(named, exchange, lr=0.01)


def rounds(named: Any, transport: Transport | None = None) -> Any:
    inner = torch.optim.AdamW(named, lr=0.01)
    exchange = Exchange(Sign(), ErrorFeedback(), min_numel=16, transport=transport)
    return LocalRounds(inner, exchange, local_steps=2)


def low(named: Any, transport: Transport | None = None) -> Any:
    return low_communication(named, lr=0.01, bits_per_parameter=4.0, transport=transport)


MAKE: dict[str, Make] = {"adam": adam, "rounds": rounds, "low": low}


def small(seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(16, 24), nn.Tanh(), nn.Linear(24, 16))


def step(model: nn.Module, optimizer: Any, seed: int, rank: int) -> None:
    optimizer.zero_grad()
    x = torch.randn(8, 16, generator=torch.Generator().manual_seed(100 * seed + rank))
    model(x).square().mean().backward()
    optimizer.step()


@pytest.mark.parametrize("make", MAKE)
@pytest.mark.parametrize("swapped_at", [0, 3])
def test_two_equal_models_in_another_order_on_one_rank(make: str, swapped_at: int) -> None:
    def rank(transport: Transport) -> str:
        pairs = []
        for _ in range(2):
            model = small()
            pairs.append((model, MAKE[make](model.named_parameters(), transport)))
        try:
            for at in range(6):
                swapped = transport.rank == 1 and at >= swapped_at
                for pair in reversed(pairs) if swapped else pairs:
                    step(*pair, at, transport.rank)
        except (ConfigMismatchError, PayloadError) as error:
            return str(error)
        return "nothing was noticed"

    for said in run_ranks(rank, 2):
        if swapped_at:
            assert "made with other settings or of other parameters" in said
        else:
            assert "number of the exchange among equal ones is 0 on rank 0, 1 on rank 1" in said


def test_a_copy_is_another_exchange() -> None:
    world = Simulated(2)
    exchanges = [Exchange(Sign(), transport=t, min_numel=1) for t in world]
    tensors = [{"w": torch.ones(4, 4)} for _ in world]
    world.run([e.round(t) for e, t in zip(exchanges, tensors, strict=True)])
    copies = [copy.deepcopy(exchange) for exchange in exchanges]
    world.run([e.round(t) for e, t in zip(copies, tensors, strict=True)])
    for exchange in exchanges:
        exchange.step += 1
    with pytest.raises(PayloadError, match="other settings"):
        world.run([e.round(t) for e, t in zip((copies[0], exchanges[1]), tensors, strict=True)])


def save_two_runs(kind: str, folder: str) -> None:
    for run in range(2):
        model, state, advance = made(kind)
        for at in range(3):
            advance(at)
        save_rank_file(state, f"{folder}/{run}")
        torch.save(saved_of(model, state), f"{folder}/{run}/shared{dist.get_rank()}.pt")


def made(kind: str) -> tuple[nn.Module, Any, Callable[[int], None]]:
    model = small()
    if kind == "hook":
        ddp = DistributedDataParallel(model)
        state: Any = register(ddp, "sign", min_numel=16)
        sgd = torch.optim.SGD(model.parameters(), lr=0.1)
        return model, state, lambda at: step(ddp, sgd, at, dist.get_rank())
    optimizer = MAKE[kind](model.named_parameters(), None)
    state = register(model, optimizer)
    return model, state, lambda at: step(model, optimizer, at, dist.get_rank())


def saved_of(model: nn.Module, state: Any) -> dict[str, Any]:
    optimizer = getattr(state, "optimizer", None)
    return {
        "model": {name: t.clone() for name, t in model.state_dict().items()},
        "optimizer": optimizer.state_dict() if optimizer is not None else None,
    }


def load(kind: str, folder: str, mixed: bool) -> str:
    model, state, _ = made(kind)
    run = dist.get_rank() if mixed else 0
    shared = torch.load(f"{folder}/{run}/shared{dist.get_rank()}.pt")
    model.load_state_dict(shared["model"])
    if shared["optimizer"] is not None:
        state.optimizer.load_state_dict(shared["optimizer"])
    try:
        load_rank_files(state, f"{folder}/{run}")
    except ValueError as error:
        return str(error)
    return "loaded"


@pytest.mark.parametrize("kind", ["hook", *MAKE])
def test_files_of_two_runs_at_the_same_step_are_not_mixed(
    ranks_of: RanksOf, kind: str, tmp_path: Path
) -> None:
    ranks = ranks_of(2)
    ranks.run(save_two_runs, kind, str(tmp_path))
    for said in ranks.run(load, kind, str(tmp_path), True):
        assert "is of another checkpoint than rank 0's" in said
    assert ranks.run(load, kind, str(tmp_path), False) == ["loaded"] * 2


def load_own_states() -> str:
    """Load states of different runs without files, and train on."""
    states = []
    for _ in range(2):
        _, state, advance = made("hook")
        for at in range(3):
            advance(at)
        states.append(state.state_dict())
    _, state, advance = made("hook")
    state.load_state_dict(states[dist.get_rank()])
    try:
        advance(3)
    except (ConfigMismatchError, PayloadError) as error:
        return str(error)
    return "nothing was noticed"


def test_states_of_two_runs_are_noticed_in_the_next_round(ranks_of: RanksOf) -> None:
    for said in ranks_of(2).run(load_own_states):
        assert "has loaded another state than" in said


def resume(make: str, transport: Transport, *, reverse: bool) -> torch.Tensor:
    """Train, save, and go on with the parameters declared in another order, or in the same."""
    rank = transport.rank
    model = small()
    optimizer = MAKE[make](model.named_parameters(), transport)
    for at in range(5):
        step(model, optimizer, at, rank)
    exchange = optimizer.exchange
    state, own = optimizer.state_dict(), exchange.state_dict()
    again = small(1)
    again.load_state_dict(model.state_dict())
    named = list(again.named_parameters())
    other = MAKE[make](named[::-1] if reverse else named, transport)
    other.load_state_dict(state)
    if make == "adam":
        other.exchange.load_state_dict(own)
    for at in range(5, 10):
        step(again, other, at, rank)
    if make != "adam":
        other.synchronize()
    return torch.cat([p.detach().flatten() for p in again.parameters()])


@pytest.mark.parametrize("make", MAKE)
def test_a_state_is_loaded_by_name(make: str) -> None:
    expected = run_ranks(lambda t: resume(make, t, reverse=False), 2)
    found = run_ranks(lambda t: resume(make, t, reverse=True), 2)
    for mine, usual in zip(found, expected, strict=True):
        torch.testing.assert_close(mine, usual, rtol=1e-4, atol=1e-5)


def test_a_state_of_another_optimizer_is_refused_in_one_line() -> None:
    model = small()
    saved = torch.optim.AdamW(model.named_parameters(), lr=0.01).state_dict()
    (transport,) = Simulated(1)
    optimizer = LocalVarianceAdam(
        model.named_parameters(), Exchange(Sign(), transport=transport), lr=0.01
    )
    assert optimizer
    with pytest.raises(ValueError, match="the state is of another optimizer"):
        optimizer.load_state_dict(torch.optim.SGD(model.named_parameters(), lr=0.1).state_dict())
    plain = LocalRounds(
        torch.optim.SGD(model.named_parameters(), lr=0.1),
        Exchange(Sign(), transport=transport),
        local_steps=2,
    )
    with pytest.raises(ValueError, match="saved with AdamW and SGD, the optimizers here are SGD"):
        plain.load_state_dict(rounds(model.named_parameters(), transport).state_dict())
    assert saved


def drift(kind: str, folder: str, way: str) -> str:
    """Change a parameter of rank 1 after the last comparison, and end the run."""
    model, state, advance = made(kind)
    for at in range(4):
        advance(at)
    rounds_ = getattr(state, "round_state", None)
    if dist.get_rank() == 1:
        shared = rounds_.model.values if rounds_ else list(model.parameters())
        with torch.no_grad():
            shared[0].view(-1)[5] += 1e-3
    saved = state.state_dict()  # alone: sends nothing
    assert saved
    try:
        if way == "files":
            save_rank_file(state, folder)
        elif way == "checkpoint":
            RankStates(state).state_dict()
        else:
            state.synchronize()
    except PayloadError as error:
        return str(error)
    return "saved"


@pytest.mark.parametrize(
    ("kind", "way"),
    [
        *[(kind, way) for kind in ("hook", *MAKE) for way in ("files", "checkpoint")],
        ("rounds", "synchronize"),
        ("low", "synchronize"),
    ],
)
def test_a_drift_in_the_last_steps_is_found_where_a_run_is_saved(
    ranks_of: RanksOf, tmp_path: Path, kind: str, way: str
) -> None:
    for said in ranks_of(2).run(drift, kind, str(tmp_path), way):
        assert "the parameters of rank 1 are not those of rank 0" in said
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(("local_steps", "fragments"), [(1, 1), (2, 2), (8, 2), (30, 1), (128, 4)])
def test_rounds_are_compared_every_32_steps(local_steps: int, fragments: int) -> None:
    (transport,) = Simulated(1)
    model = small()
    inner = torch.optim.SGD(model.named_parameters(), lr=0.1)
    exchange = Exchange(Sign(), transport=transport)
    LocalRounds(inner, exchange, local_steps=local_steps, fragments=fragments)
    compared = []
    for exchange.step in range(1, 200):
        if exchange.verifies():
            compared.append(exchange.step)
    gaps = [b - a for a, b in itertools.pairwise([0, *compared])]
    longest = max(32, local_steps // fragments)
    assert max(gap * local_steps / fragments for gap in gaps) < longest + local_steps / fragments
