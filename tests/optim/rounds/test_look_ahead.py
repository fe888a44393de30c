"""Replicas that begin where the server's model will be once their residual has arrived."""

import copy
from collections.abc import Sequence
from contextlib import nullcontext as _nothing
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.optim import SGD

from comm_hooks import ErrorFeedback, Exchange, TopK
from comm_hooks.collectives import Transport, run_ranks
from comm_hooks.memory.base import Memory
from comm_hooks.optim import LocalRounds
from tests.optim.scenarios import rarely

SIZE, RANKS, K, LR, ETA = 48, 3, 2, 0.1, 1.5
KEPT = SIZE // 16


def slope(point: torch.Tensor, rank: int) -> torch.Tensor:
    """Return the gradient of a quadratic of this rank's own."""
    generator = torch.Generator().manual_seed(rank)
    curvature = torch.rand(SIZE, generator=generator, dtype=torch.float64) + 0.5
    target = torch.randn(SIZE, generator=generator, dtype=torch.float64)
    return curvature.to(point) * (point - target.to(point))


def make_rounds(
    parameters: Sequence[nn.Parameter],
    transport: Transport,
    look_ahead: float,
    memory: Memory | None = None,
    **options: Any,
) -> LocalRounds:
    exchange = Exchange(
        TopK(density=1 / 16, value_bits=32),
        memory or ErrorFeedback(),
        min_numel=1,
        collective="all_gather",
        transport=transport,
    )
    named = [(str(i), parameter) for i, parameter in enumerate(parameters)]
    options = {"local_steps": K, **options}
    server = SGD(named, lr=ETA)
    return LocalRounds(SGD(named, lr=LR), exchange, server, look_ahead=look_ahead, **options)


def go(rounds: LocalRounds, parameters: Sequence[nn.Parameter], steps: int, rank: int) -> None:
    for _ in range(steps):
        for parameter in parameters:
            parameter.grad = slope(parameter.detach().flatten(), rank).view_as(parameter)
        rounds.step()


def reference(rounds: int, share: float) -> tuple[np.ndarray, np.ndarray]:
    """Return the server's model and where each rank is, in float64."""
    x = np.zeros(SIZE)
    e, live = np.zeros((RANKS, SIZE)), np.zeros((RANKS, SIZE))
    for _ in range(rounds):
        starts, sent = live.copy(), np.zeros((RANKS, SIZE))
        for i in range(RANKS):
            for _ in range(K):
                live[i] -= LR * slope(torch.from_numpy(live[i]), i).numpy()
            total = starts[i] - live[i] + e[i]
            places = np.argsort(-np.abs(total))[:KEPT]
            sent[i, places] = total[places]
            e[i] = total - sent[i]
        x = x - ETA * sent.mean(0)
        live = x - share * e
    return x, live


@pytest.mark.parametrize("share", [0.3, *rarely(0.0, ETA / RANKS, 1.0)])
def test_it_matches_the_reference(share: float) -> None:
    def rank(transport: Transport) -> tuple[torch.Tensor, torch.Tensor]:
        parameter = nn.Parameter(torch.zeros(1, SIZE))
        rounds = make_rounds([parameter], transport, share)
        go(rounds, [parameter], 6 * K, transport.rank)
        with rounds.server_parameters():
            shared = parameter.detach().clone()
        return shared[0], parameter.detach()[0]

    shared, live = reference(6, share)
    for index, (x, own) in enumerate(run_ranks(rank, RANKS)):
        np.testing.assert_allclose(x.numpy(), shared, atol=1e-5)
        np.testing.assert_allclose(own.numpy(), live[index], atol=1e-5)


@pytest.mark.parametrize(
    ("bits", "dtype"), [(32, torch.float32), (16, torch.bfloat16), (4, torch.float32)]
)
def test_any_precision_of_residual_and_parameter(bits: int, dtype: torch.dtype) -> None:
    def rank(transport: Transport) -> None:
        parameter = nn.Parameter(torch.zeros(2, SIZE // 2, dtype=dtype).t())
        rounds = make_rounds([parameter], transport, 0.5, ErrorFeedback(bits))
        go(rounds, [parameter], K, transport.rank)
        assert rounds.exchange.memory
        waiting = rounds.exchange.memory.vector("0")
        assert waiting is not None
        own = parameter.detach().clone()
        with rounds.server_parameters():
            ahead = parameter.detach() - 0.5 * waiting.view(parameter.shape).to(dtype)
        torch.testing.assert_close(
            own, ahead, atol=1e-2 if dtype == torch.bfloat16 else 1e-6, rtol=0
        )
        assert own.ne(0).all()

    run_ranks(rank, 2)


@pytest.mark.parametrize("steps", [3, 4, 5])
def test_replicas_agree_after_synchronizing(steps: int) -> None:
    def rank(transport: Transport) -> list[torch.Tensor]:
        parameters = [nn.Parameter(torch.zeros(1, SIZE)) for _ in range(2)]
        rounds = make_rounds(parameters, transport, 0.5, fragments=2)
        go(rounds, parameters, steps, transport.rank)
        rounds.synchronize()
        with rounds.server_parameters():
            shared = [p.detach().clone() for p in parameters]
        for parameter, value in zip(parameters, shared, strict=True):
            assert torch.equal(parameter, value)
        return shared

    for others in zip(*run_ranks(rank, 3), strict=True):
        assert all(torch.equal(other, others[0]) for other in others)


def test_another_ranks_state_begins_at_the_servers_model() -> None:
    saved: dict[str, Any] = {}

    def rank(transport: Transport) -> None:
        parameter = nn.Parameter(torch.zeros(1, SIZE))
        rounds = make_rounds([parameter], transport, 0.5)
        go(rounds, [parameter], 3, transport.rank)
        saved.setdefault("state", copy.deepcopy(rounds.state_dict()))
        rounds.synchronize()

    run_ranks(rank, 2)

    def resume(transport: Transport) -> torch.Tensor:
        parameter = nn.Parameter(torch.zeros(1, SIZE))
        rounds = make_rounds([parameter], transport, 0.5)
        rounds.load_state_dict(copy.deepcopy(saved["state"]))
        if transport.rank != saved["state"]["rank"]:
            assert torch.equal(parameter, saved["state"]["rounds"]["released"]["model"]["0"])
        with pytest.warns(UserWarning, match="goes on from") if transport.rank else _nothing():
            go(rounds, [parameter], 3, transport.rank)
        with rounds.server_parameters():
            return parameter.detach().clone()

    models = run_ranks(resume, 2)
    assert torch.equal(*models)
