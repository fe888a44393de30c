"""Weight decay that all ranks take alike, and that therefore needs no communication."""

import copy
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import SGD, AdamW, Optimizer
from torch.optim.lr_scheduler import LambdaLR

from comm_hooks import ErrorFeedback, Exchange, Identity, TopK
from comm_hooks.collectives import Simulated, Transport, run_ranks
from comm_hooks.compressors import Compressor
from comm_hooks.optim import LocalRounds, MuonAdamW
from tests.optim.scenarios import rarely

SHAPES = {"a": (8, 16), "b": (4, 16), "c": (16,)}
SPARSE = TopK(density=1 / 16, value_bits=1)
RANKS, K, DECAY = 3, 4, 0.3


def make_parameters() -> dict[str, nn.Parameter]:
    generator = torch.Generator().manual_seed(7)
    return {n: nn.Parameter(torch.randn(s, generator=generator)) for n, s in SHAPES.items()}


def make_adamw(parameters: dict[str, nn.Parameter]) -> tuple[AdamW, LambdaLR]:
    """Return an optimizer that decays two of three parameters, and its schedule."""
    decaying = {"params": [parameters["a"], parameters["b"]], "weight_decay": DECAY}
    adamw = AdamW([decaying, {"params": [parameters["c"]], "weight_decay": 0.0}], lr=0.1)
    return adamw, LambdaLR(adamw, lambda step: 1 / (1 + step))


def make_rounds(
    inner: Optimizer, transport: Transport, compressor: Compressor, **options: Any
) -> LocalRounds:
    memory = None if isinstance(compressor, Identity) else ErrorFeedback(decay=0.9)
    exchange = Exchange(compressor, memory, min_numel=1, min_ndim=1, transport=transport)
    server = SGD([p for group in inner.param_groups for p in group["params"]], lr=2.0)
    return LocalRounds(inner, exchange, server, **{"local_steps": K, **options})


def train(
    parameters: dict[str, nn.Parameter],
    optimizer: Optimizer,
    schedule: LambdaLR,
    seed: int | None,
    steps: range = range(10),
) -> None:
    """Take steps along random gradients, or along none."""
    for step in steps:
        for parameter in parameters.values():
            generator = torch.Generator().manual_seed(100 * step + (seed or 0))
            scale = 0.0 if seed is None else 1.0
            parameter.grad = scale * torch.randn(parameter.shape, generator=generator)
        optimizer.step()
        schedule.step()


@pytest.mark.parametrize(("fragments", "look_ahead"), [(1, 0.0), (3, 0.5), *rarely((2, 0.5))])
@pytest.mark.parametrize("shared", [True, False])
def test_decay_arrives_whole_where_nothing_else_is_sent(
    fragments: int, look_ahead: float, shared: bool
) -> None:
    """Whatever the compressor, the fading residuals and the server's step."""
    expected = make_parameters()
    train(expected, *make_adamw(expected), seed=None)

    def rank(transport: Transport) -> float:
        parameters = make_parameters()
        inner, schedule = make_adamw(parameters)
        options = {"fragments": fragments, "look_ahead": look_ahead, "shared_decay": shared}
        rounds = make_rounds(inner, transport, SPARSE, **options)
        train(parameters, rounds, schedule, seed=None)
        rounds.synchronize()
        distances = [(parameters[n] - expected[n]).detach().abs().max() for n in SHAPES]
        return float(max(distances))

    for distance in run_ranks(rank, RANKS):
        assert distance < 1e-6 if shared else distance > 1e-2


@pytest.mark.parametrize("way", ["no gradient", "one rank has none", "overflow", "a NaN"])
@pytest.mark.parametrize("fragments", [3, *rarely(1, 2)])
def test_steps_that_are_left_out_decay_all_the_same(way: str, fragments: int) -> None:
    """Else what has not decayed would count as progress, and be sent in few bits."""
    expected = make_parameters()
    train(expected, *make_adamw(expected), seed=None)

    def rank(transport: Transport) -> float:
        parameters = make_parameters()
        inner, schedule = make_adamw(parameters)
        rounds = make_rounds(inner, transport, SPARSE, fragments=fragments, shared_decay=True)
        if way == "overflow":
            rounds.found_inf = torch.ones(1)  # as a GradScaler says it
        for step in range(10):
            # After which the rank begins again, also where no exchange is due yet.
            is_bad = way == "a NaN" and (transport.rank, step) == (1, 2)
            for parameter in parameters.values():
                has_none = way == "no gradient" or (way[:3] == "one" and transport.rank == 1)
                value = torch.full_like(parameter, torch.nan if is_bad else 0.0)
                parameter.grad = None if has_none else value
            rounds.step()
            schedule.step()
        rounds.synchronize()
        return float(max((parameters[n] - expected[n]).detach().abs().max() for n in SHAPES))

    assert max(run_ranks(rank, RANKS)) < 1e-6


@pytest.mark.parametrize("fragments", [1, 3])
def test_weights_that_are_set_have_not_decayed_yet(fragments: int) -> None:
    expected = make_parameters()
    train(expected, *make_adamw(expected), seed=None, steps=range(3))
    with torch.no_grad():
        expected["a"].fill_(1.0)
    adamw, schedule = make_adamw(expected)
    for _ in range(3):
        schedule.step()
    train(expected, adamw, schedule, seed=None, steps=range(3, 10))

    def rank(transport: Transport) -> float:
        parameters = make_parameters()
        inner, schedule = make_adamw(parameters)
        rounds = make_rounds(inner, transport, SPARSE, fragments=fragments, shared_decay=True)
        train(parameters, rounds, schedule, seed=None, steps=range(3))
        with torch.no_grad():
            parameters["a"].fill_(1.0)
        rounds.restart([parameters["a"]])
        train(parameters, rounds, schedule, seed=None, steps=range(3, 10))
        rounds.synchronize()
        return float(max((parameters[n] - expected[n]).detach().abs().max() for n in SHAPES))

    assert max(run_ranks(rank, RANKS)) < 1e-6


@pytest.mark.parametrize("fragments", [1, 2])
def test_uncompressed_and_averaged_it_changes_nothing(fragments: int) -> None:
    def rank(transport: Transport) -> list[torch.Tensor]:
        ends = []
        for shared in (False, True):
            parameters = make_parameters()
            inner, schedule = make_adamw(parameters)
            exchange = Exchange(Identity(), transport=transport)
            options = {"local_steps": K, "fragments": fragments, "shared_decay": shared}
            rounds = LocalRounds(inner, exchange, **options)
            train(parameters, rounds, schedule, seed=transport.rank)
            rounds.synchronize()
            ends.append(torch.cat([p.detach().flatten() for p in parameters.values()]))
        return ends

    results = run_ranks(rank, RANKS)
    for local, shared in results:
        torch.testing.assert_close(shared, local, atol=1e-6, rtol=0)
        assert torch.equal(shared, results[0][1])


@pytest.mark.parametrize("fragments", [1, 2])
def test_it_resumes_bit_for_bit_between_exchanges(fragments: int) -> None:
    def rank(transport: Transport) -> None:
        def make() -> tuple[dict[str, nn.Parameter], LocalRounds, LambdaLR]:
            parameters = make_parameters()
            inner, schedule = make_adamw(parameters)
            options = {"fragments": fragments, "look_ahead": 0.3, "shared_decay": True}
            return parameters, make_rounds(inner, transport, SPARSE, **options), schedule

        parameters, rounds, schedule = make()
        train(parameters, rounds, schedule, transport.rank, range(7))
        saved = copy.deepcopy((rounds.state_dict(), schedule.state_dict()))
        again, resumed, its_schedule = make()
        resumed.load_state_dict(saved[0])
        its_schedule.load_state_dict(saved[1])
        train(parameters, rounds, schedule, transport.rank, range(7, 14))
        train(again, resumed, its_schedule, transport.rank, range(7, 14))
        for one, other in zip(parameters.values(), again.values(), strict=True):
            assert torch.equal(one, other)

    run_ranks(rank, RANKS)


def test_muon_may_decay_so() -> None:
    inner = MuonAdamW(make_parameters().items(), lr=0.1)
    assert make_rounds(inner, Simulated(2)[0], SPARSE, shared_decay=True).shared_decay
