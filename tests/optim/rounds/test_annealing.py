"""Residuals that shrink with the learning rate: by how much, when, and what is saved of it."""

import copy

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.optim import SGD

from comm_hooks import ErrorFeedback, Exchange, TopK
from comm_hooks.collectives import Simulated, Transport, run_ranks
from comm_hooks.optim import LocalRounds, Participation

SIZE = 64


def make_rounds(
    parameter: nn.Parameter, transport: Transport, *, anneal: bool, lr: float = 1.0
) -> LocalRounds:
    """Rounds of one step that send one element in sixteen."""
    exchange = Exchange(
        TopK(density=1 / 16, value_bits=32), ErrorFeedback(), min_numel=1, transport=transport
    )
    inner = SGD([("w", parameter)], lr=lr)
    return LocalRounds(inner, exchange, local_steps=1, anneal_residuals=anneal)


def gradient(step: int) -> torch.Tensor:
    return torch.randn(1, SIZE, generator=torch.Generator().manual_seed(step))


def train(rates: list[float], *, anneal: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """Return what one rank's displacements have come to, and what it still remembers."""
    parameter = nn.Parameter(torch.zeros(1, SIZE))
    rounds = make_rounds(parameter, Simulated(1)[0], anneal=anneal)
    for step, rate in enumerate(rates):
        rounds.param_groups[0]["lr"] = rate
        parameter.grad = gradient(step)
        rounds.step()
    (kept,) = rounds.exchange.state_dict()["memory"].values()
    return parameter.detach().clone(), kept.flatten()[:SIZE].clone()


rates = st.lists(st.sampled_from([0.0, 0.01, 0.25, 0.5, 1.0, 2.0]), min_size=1, max_size=8)


@pytest.mark.filterwarnings("ignore:world size is 1")
@settings(deadline=None)
@given(rates=rates)
def test_what_waits_is_in_units_of_the_learning_rate(rates: list[float]) -> None:
    moved, kept = train(rates, anneal=True)
    assert moved.isfinite().all()
    assert kept.isfinite().all()
    # The reference: a residual that is multiplied by how much the rate fell from its largest.
    expected, residual, largest, before = torch.zeros(SIZE), torch.zeros(SIZE), 0.0, 1.0
    for step, rate in enumerate(rates):
        largest = max(largest, rate)
        scale = max(rate / largest, 2.0**-10) if largest else 1.0
        delta = rate * gradient(step)[0]
        if delta.any():  # a rank that has nothing to add leaves its residual alone
            total = delta + residual * (scale / before)
            sent = torch.zeros(SIZE)
            places = total.abs().topk(SIZE // 16).indices
            sent[places] = total[places]
            expected, residual, before = expected - sent, total - sent, scale
    # Displacements are differences of parameters: what rounding takes from short ones grows with
    # the residual when the rate rises again.
    torch.testing.assert_close(moved[0], expected, rtol=1e-3, atol=2e-3)
    torch.testing.assert_close(kept * before, residual, rtol=1e-3, atol=2e-3)


@pytest.mark.filterwarnings("ignore:world size is 1")
def test_a_rate_that_only_rises_loses_nothing() -> None:
    rising = [0.1, 0.2, 0.4, 0.8]
    for annealed, plain in zip(
        train(rising, anneal=True), train(rising, anneal=False), strict=True
    ):
        assert torch.equal(annealed, plain)


def test_it_resumes_bit_for_bit_in_the_middle_of_a_schedule() -> None:
    def rank(transport: Transport) -> None:
        parameter = nn.Parameter(torch.zeros(1, SIZE))
        rounds = make_rounds(parameter, transport, anneal=True)

        def go(rounds: LocalRounds, parameter: nn.Parameter, steps: range) -> None:
            for step in steps:
                rounds.param_groups[0]["lr"] = 1.0 / (1 + step)
                parameter.grad = gradient(7 * step + transport.rank)
                rounds.step()

        go(rounds, parameter, range(3))
        saved = copy.deepcopy(rounds.state_dict())
        again = nn.Parameter(torch.zeros(1, SIZE))
        resumed = make_rounds(again, transport, anneal=True)
        resumed.load_state_dict(saved)
        go(rounds, parameter, range(3, 6))
        go(resumed, again, range(3, 6))
        assert torch.equal(parameter, again)

    run_ranks(rank, 3)


def test_clients_with_rates_of_their_own_are_refused() -> None:
    parameter = nn.Parameter(torch.zeros(1, SIZE))
    exchange = Exchange(TopK(density=0.5), ErrorFeedback(), transport=Simulated(2)[0])
    with pytest.raises(ValueError, match="anneal_residuals cannot go with participation"):
        LocalRounds(
            SGD([("w", parameter)], lr=1.0),
            exchange,
            participation=Participation(clients=4),
            anneal_residuals=True,
        )
    with pytest.raises(ValueError, match="anneal_residuals"):
        LocalRounds(
            SGD([("w", parameter)], lr=1.0),
            exchange,
            local_steps=1,
            anneal_residuals=1,  # type: ignore[arg-type]
        )
