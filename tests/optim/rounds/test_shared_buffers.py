"""Buffers that forward passes change are averaged, shown in evaluation, and saved."""

import copy
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import AdamW

import comm_hooks
from comm_hooks import ErrorFeedback, Exchange, TopK, register
from comm_hooks.collectives import Transport, run_ranks
from comm_hooks.optim import LocalRounds, low_communication
from tests.ranks import RanksOf


class Codebook(nn.Module):
    """A moving average of activations that forward passes replace by another tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("code", torch.zeros(8))
        self.register_buffer("mask", torch.ones(64, 64))
        self.register_buffer("count", torch.zeros((), dtype=torch.long))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.training:
            self.code = 0.9 * self.code + 0.1 * x.detach().mean(0)
            self.count += 1
        return x * self.mask[0, 0]


def model_of() -> nn.Module:
    torch.manual_seed(0)
    layers = (
        nn.Linear(8, 8),
        Codebook(),
        nn.BatchNorm1d(8),
        nn.utils.parametrizations.spectral_norm(nn.Linear(8, 4)),
    )
    return nn.Sequential(*layers)


def rounds_of(model: nn.Module, transport: Transport, kind: str) -> LocalRounds:
    if kind == "low_communication":
        return low_communication(
            model.named_parameters(), lr=0.01, bits_per_parameter=16.0, transport=transport
        )
    exchange = Exchange(TopK(density=0.5), ErrorFeedback(), transport=transport)
    inner = torch.optim.SGD(model.named_parameters(), lr=0.01)
    return LocalRounds(inner, exchange, local_steps=2)


def train(model: nn.Module, rounds: Any, steps: range, rank: int) -> None:
    for step in steps:
        generator = torch.Generator().manual_seed(100 * step + rank)
        x = rank + torch.randn(8, 8, generator=generator)
        model(x).square().mean().backward()
        rounds.step()
        rounds.zero_grad()


def buffers(model: nn.Module) -> dict[str, torch.Tensor]:
    return {n: b.detach().clone() for n, b in model.named_buffers() if b.is_floating_point()}


def same(first: dict[str, torch.Tensor], second: dict[str, torch.Tensor]) -> bool:
    return not [name for name in first if not torch.equal(first[name], second[name])]


@pytest.mark.parametrize("kind", ["low_communication", "rounds"])
def test_evaluation_and_checkpoints_have_what_all_ranks_share(kind: str) -> None:
    def check(transport: Transport) -> list[dict[str, torch.Tensor]]:
        model = model_of()
        rounds = rounds_of(model, transport, kind)
        register(model, rounds)
        found = [buffers(model.eval())]
        model.train()
        train(model, rounds, range(41), transport.rank)
        own = buffers(model)
        saved = {n: v for n, v in model.state_dict().items() if n in own}
        found += [own, saved, buffers(copy.deepcopy(model)), buffers(model.eval())]
        model.train()
        assert same(buffers(model), own)
        rounds.synchronize()
        found.append(buffers(model))
        averaged = [name for name in rounds.round_state.buffers.names if "mask" in name]
        assert not averaged, "it never changes"
        return found

    for (before, own, *rest), (_, other, *others) in [tuple(run_ranks(check, 2))]:
        assert not same(own, other)
        for mine, theirs in zip(rest, others, strict=True):
            assert same(mine, theirs)
            assert not torch.equal(mine["2.running_mean"], before["2.running_mean"])
        saved, copied, shown, _ = rest
        assert same(saved, shown)
        assert same(saved, copied)
        # Not far from the mean of both ranks, which the last exchanges have seen.
        for name in ("2.running_mean", "1.code"):
            middle = (own[name] + other[name]) / 2
            assert (shown[name] - middle).norm() < 0.5 * (own[name] - other[name]).norm()


def test_a_resumed_run_goes_on_bit_for_bit() -> None:
    def check(transport: Transport) -> None:
        whole = model_of()
        rounds = rounds_of(whole, transport, "low_communication")
        register(whole, rounds)
        train(whole, rounds, range(7), transport.rank)
        states = copy.deepcopy(whole.state_dict()), rounds.state_dict()
        train(whole, rounds, range(7, 12), transport.rank)
        for order in (0, 1):
            model = model_of()
            again = rounds_of(model, transport, "low_communication")
            register(model, again)
            for which in (order, 1 - order):
                (model, again)[which].load_state_dict(states[which])
            train(model, again, range(7, 12), transport.rank)
            assert same(buffers(model), buffers(whole))
            assert all(map(torch.equal, model.parameters(), whole.parameters()))

    run_ranks(check, 2)


OPERATIONS: dict[str, Callable[[nn.Module, LocalRounds, Any], object]] = {
    "synchronize": lambda model, rounds, saved: rounds.synchronize(),
    "save and load the optimizer": lambda model, rounds, saved: rounds.load_state_dict(
        rounds.state_dict()
    ),
    "load the optimizer": lambda model, rounds, saved: rounds.load_state_dict(saved[1]),
    "load the model": lambda model, rounds, saved: model.load_state_dict(saved[0]),
    "load both": lambda model, rounds, saved: (
        rounds.load_state_dict(saved[1]),
        model.load_state_dict(saved[0]),
    ),
}


@pytest.mark.parametrize("operation", OPERATIONS.values(), ids=OPERATIONS)
@pytest.mark.parametrize("kind", ["low_communication", "rounds"])
def test_operations_do_the_same_while_the_shared_values_are_shown(
    kind: str, operation: Callable[[nn.Module, LocalRounds, Any], object]
) -> None:
    def check(transport: Transport) -> None:
        found = []
        for place in ("train", "eval", "server_parameters"):
            model = model_of()
            rounds = rounds_of(model, transport, kind)
            register(model, rounds)
            train(model, rounds, range(3), transport.rank)
            saved = copy.deepcopy((model.state_dict(), rounds.state_dict()))
            train(model, rounds, range(3, 7), transport.rank)
            model.train(place != "eval")
            with rounds.server_parameters() if place == "server_parameters" else nullcontext():
                operation(model, rounds, saved)
                shared = copy.deepcopy(model.state_dict())
                kept = rounds.state_dict()["rounds"]["private"]["buffers"]["own"]
            model.train()
            own = buffers(model)
            train(model, rounds, range(7, 12), transport.rank)
            parameters = {name: p.detach().clone() for name, p in model.named_parameters()}
            found.append((shared, kept, own, buffers(model), parameters))
        for others in found[1:]:
            assert all(map(same, found[0], others))

    run_ranks(check, 2)


def test_they_need_few_of_the_bytes() -> None:
    def check(transport: Transport) -> float:
        torch.manual_seed(0)
        layers = [nn.Linear(128, 128), nn.BatchNorm1d(128)]
        model = nn.Sequential(*layers)
        rounds = low_communication(
            model.named_parameters(), lr=0.01, bits_per_parameter=0.3, transport=transport
        )
        register(model, rounds)
        for _ in range(100):
            model(torch.randn(8, 128)).square().mean().backward()
            rounds.step()
            rounds.zero_grad()
        return rounds.stats()["bytes_sent"] / 100

    own = sum(p.numel() for p in (nn.Linear(128, 128).weight,)) + 3 * 128
    for sent in run_ranks(check, 2):
        assert 8 * sent / own < 0.3 * (1 + 1 / 16) + 0.01


def broadcasts() -> tuple[bool, dict[str, torch.Tensor]]:
    model = model_of()
    ddp = DistributedDataParallel(model)
    optimizer = comm_hooks.replace(ddp, AdamW(ddp.parameters(), lr=0.01), bits_per_parameter=16.0)
    train(ddp, optimizer, range(20), dist.get_rank())
    return ddp.broadcast_buffers, buffers(ddp.eval())


def test_ddp_does_not_broadcast_them_as_well(ranks_of: RanksOf) -> None:
    (first, own), (second, other) = ranks_of(2).run(broadcasts)
    assert not first
    assert not second
    assert same(own, other)
