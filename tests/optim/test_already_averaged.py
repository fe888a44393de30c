"""A forgotten skip_hook is noticed at the first step, on all ranks; what looks like it is not."""

import contextlib
import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed._composable.replicate import replicate
from torch.distributed.algorithms.ddp_comm_hooks.debugging_hooks import noop_hook
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.nn.parallel import DistributedDataParallel

from comm_hooks import (
    CountSketch,
    ErrorFeedback,
    Exchange,
    PeerError,
    Sign,
    TopK,
    register,
    skip_hook,
)
from comm_hooks.optim import LocalRounds, LocalVarianceAdam, Marina, Participation
from comm_hooks.optim.already_averaged import averaging_hook
from tests.optim.scenarios import RanksOf, rarely
from tests.test_hook import Net, batch


def local_hook(
    state: object,
    bucket: dist.GradBucket,  # type: ignore[name-defined]
) -> torch.futures.Future[torch.Tensor]:
    """Somebody's own way to send nothing."""
    future: torch.futures.Future[torch.Tensor] = torch.futures.Future()
    future.set_result(bucket.buffer())
    return future


def plain(net: Net) -> nn.Module:
    return DistributedDataParallel(net)


def hooked(hook: Callable[..., Any]) -> Callable[[Net], nn.Module]:
    def wrap(net: Net) -> nn.Module:
        ddp = DistributedDataParallel(net)
        ddp.register_comm_hook(None, hook)
        return ddp

    return wrap


def built_in(net: Net) -> nn.Module:
    ddp = DistributedDataParallel(net)
    ddp._register_builtin_comm_hook(dist.BuiltinCommHookType.FP16_COMPRESS)
    return ddp


def compressed(net: Net) -> nn.Module:
    ddp = DistributedDataParallel(net)
    register(ddp, "topk", density=0.1)
    return ddp


def replicated(net: Net) -> nn.Module:
    return replicate(net)


def replicated_and_skipped(net: Net) -> nn.Module:
    replicate(net).register_comm_hook(None, skip_hook)
    return net


def averaged_elsewhere(net: Net) -> nn.Module:
    """DDP around a copy, as an exponential average has it."""
    ddp = DistributedDataParallel(net)
    net.kept = [copy.deepcopy(ddp)]  # type: ignore[assignment]
    ddp.register_comm_hook(None, skip_hook)
    return ddp


Wrap = Callable[[Net], nn.Module]
AVERAGED: dict[str, tuple[Wrap, str]] = {
    "plain": (plain, "all_reduce"),
    "another hook": (hooked(fp16_compress_hook), "fp16_compress_hook"),
    "built-in": (built_in, "BuiltinCommHookType.FP16_COMPRESS"),
    "compressed": (compressed, "compression_hook"),
    "replicate": (replicated, "all_reduce"),
}
NOT_AVERAGED: dict[str, Wrap] = {
    "skip_hook": hooked(skip_hook),
    "noop_hook": hooked(noop_hook),
    "somebody's hook": hooked(local_hook),
    "replicate": replicated_and_skipped,
    "a copy": averaged_elsewhere,
    "no DDP": lambda net: net,
}


def judge(kind: str, case: str, compiled: bool) -> str | None:
    """Return the hook that has averaged in one backward pass."""
    torch.manual_seed(0)
    net = Net()
    wrap = AVERAGED[case][0] if kind == "averaged" else NOT_AVERAGED.get(case, plain)
    model = wrap(net)
    model = torch.compile(model, backend="aot_eager") if compiled else model
    inputs, targets = batch(0, 0)
    with model.no_sync() if case.endswith("no_sync") else contextlib.nullcontext():
        nn.functional.cross_entropy(model(inputs), targets).backward()
    return averaging_hook(list(net.parameters()))


@pytest.mark.parametrize(
    ("case", "compiled"),
    [
        ("plain", False),
        ("compressed", False),
        *rarely(
            ("another hook", False), ("built-in", False), ("replicate", False), ("plain", True)
        ),
    ],
)
def test_averaged_gradients_are_refused(ranks_of: RanksOf, case: str, compiled: bool) -> None:
    assert ranks_of(2).run(judge, "averaged", case, compiled) == [AVERAGED[case][1]] * 2


@pytest.mark.parametrize(
    "case",
    [
        "skip_hook",
        "a copy",
        *rarely("noop_hook", "somebody's hook", "replicate", "no DDP", "DDP under no_sync"),
    ],
)
def test_what_was_not_averaged_is_not_refused(ranks_of: RanksOf, case: str) -> None:
    assert ranks_of(2).run(judge, "not averaged", case, False) == [None, None]


def test_one_rank_has_nobody_to_average_with(ranks_of: RanksOf) -> None:
    ((message, moved, _),) = ranks_of(1).run(step, "adam")
    assert message == ""
    assert moved


def step_sharded(name: str, kind: str) -> str:
    """Return the error of the first step of a model under FSDP on 4 ranks."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 3))
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    group = None
    if kind == "FSDP1":
        model: nn.Module = FullyShardedDataParallel(
            net, use_orig_params=True, device_id=torch.device("cpu")
        )
    elif kind == "FSDP2":
        model = fully_shard(net)
    else:
        model, group = fully_shard(net, mesh=mesh), mesh["replicate"].get_group()
    exchange = Exchange(Sign(), ErrorFeedback(), process_group=group)
    try:
        optimizer = OPTIMIZERS[name](model, exchange)
        model(torch.randn(4, 64)).square().sum().backward()
        optimizer.step()
    except ValueError as error:
        return str(error)
    return ""


AVERAGED_BY_FSDP = "the parameters are sharded over ranks 0, 1, 2, 3, and FSDP has averaged"


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("name", "kind", "expected"),
    [
        ("adam", "HSDP", ["over ranks 0, 2, and", "over ranks 1, 3, and"] * 2),
        # Rounds copy parameters when they are made.
        ("local_rounds", "FSDP2", ["a DTensor (FSDP2, tensor parallelism) is sharded"] * 4),
        *rarely(
            ("adam", "FSDP2", [AVERAGED_BY_FSDP] * 4),
            ("adam", "FSDP1", ["over ranks 0, 1, 2, 3, and"] * 4),
            ("local_rounds", "FSDP1", ["over ranks 0, 1, 2, 3, and"] * 4),
        ),
    ],
)
def test_what_fsdp_averages_is_refused_at_the_first_step(
    ranks_of: RanksOf, name: str, kind: str, expected: list[str]
) -> None:
    messages = ranks_of(4).run(step_sharded, name, kind)
    assert all(part in message for message, part in zip(messages, expected, strict=True))


def adam(net: nn.Module, exchange: Exchange | None = None) -> Any:
    exchange = exchange or Exchange(Sign(), ErrorFeedback())
    return LocalVarianceAdam(net.named_parameters(), exchange, lr=1e-3)


def marina(net: nn.Module) -> Any:
    return Marina(net.named_parameters(), Exchange(CountSketch(ratio=0.2)), lr=1e-3, p=0.5)


def local_rounds(net: nn.Module, exchange: Exchange | None = None) -> Any:
    inner = torch.optim.AdamW(net.named_parameters(), lr=1e-3)
    exchange = exchange or Exchange(TopK(density=0.1), ErrorFeedback())
    return LocalRounds(inner, exchange, local_steps=2)


OPTIMIZERS = {"adam": adam, "marina": marina, "local_rounds": local_rounds}


def step(name: str) -> tuple[str, bool, float]:
    """Return the error of the first step, whether parameters moved, and the bytes sent."""
    torch.manual_seed(0)
    net = Net()
    ddp = DistributedDataParallel(net)
    optimizer = OPTIMIZERS[name](net)
    before = [p.detach().clone() for p in net.parameters()]

    def closure(micro: int = 0) -> torch.Tensor:
        optimizer.zero_grad()
        inputs, targets = batch(micro, dist.get_rank())
        loss = nn.functional.cross_entropy(ddp(inputs), targets)
        loss.backward()
        return loss.detach()

    message = ""
    try:
        optimizer.step(closure)
    except ValueError as error:
        message = str(error)
    moved = any(not torch.equal(p, old) for p, old in zip(net.parameters(), before, strict=True))
    return message, moved, optimizer.exchange.stats()["bytes_sent"]


@pytest.mark.parametrize("name", ["adam", "local_rounds", *rarely("marina")])
def test_a_forgotten_skip_hook_is_refused_at_the_first_step(ranks_of: RanksOf, name: str) -> None:
    for message, moved, sent in ranks_of(2).run(step, name):
        assert message.startswith("DDP has averaged the gradients (its hook: all_reduce)")
        assert not moved
        assert sent == 0


def play(how: str) -> tuple[str, bool, float, int]:
    """Play two rounds of two steps a client; return as :func:`step` does, and the turns begun."""
    torch.manual_seed(0)
    net = Net()
    ddp = DistributedDataParallel(net)
    rounds = LocalRounds(
        torch.optim.SGD(net.named_parameters(), lr=0.1),
        Exchange(CountSketch(ratio=0.2)),  # linear: nothing is exchanged before a round's end
        participation=Participation(4),
    )
    before = [p.detach().clone() for p in net.parameters()]
    message, turns = "", 0
    try:
        for _ in range(2):
            for client in rounds.clients():
                turns += 1
                # A client without data takes no step.
                for micro in range(0 if how == "empty" and client < 2 else 2):
                    rounds.zero_grad()
                    inputs, targets = batch(micro, client)
                    nn.functional.cross_entropy(ddp(inputs), targets).backward()
                    rounds.step()
    except (ValueError, PeerError) as error:
        message = str(error)
    moved = any(not torch.equal(p, old) for p, old in zip(net.parameters(), before, strict=True))
    return message, moved, rounds.exchange.stats()["bytes_sent"], turns


@pytest.mark.parametrize("how", ["as ever", "empty"])
def test_clients_whose_gradients_ddp_has_averaged_are_refused_in_the_first_turn(
    ranks_of: RanksOf, how: str
) -> None:
    for message, moved, sent, _ in ranks_of(2).run(play, how):
        assert "DDP has averaged the gradients (its hook: all_reduce)" in message
        assert not moved
        assert sent == 0
