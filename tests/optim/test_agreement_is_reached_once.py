"""Ranks compare in words what they exchange when it is new, and never again: that takes a while."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from comm_hooks import ErrorFeedback, Exchange, TopK
from comm_hooks.collectives import Transport, run_ranks
from comm_hooks.exchange import exchange as exchanges
from comm_hooks.optim import (
    LocalRounds,
    low_communication,
)
from tests.optim.catalog import MAKE

Make = Callable[[nn.Module, Transport], Any]


MAKERS: dict[str, Make] = {
    "low_communication": lambda model, transport: low_communication(
        model.named_parameters(), lr=0.01, bits_per_parameter=1.0, transport=transport
    ),
    "fragments": lambda model, transport: LocalRounds(
        torch.optim.SGD(model.parameters(), lr=0.1),
        Exchange(TopK(density=0.1), ErrorFeedback(), transport=transport),
        local_steps=4,
        fragments=3,
    ),
    "micro_adam": lambda model, transport: MAKE["micro_32"](
        model.named_parameters(), transport=transport
    ),
    "one_bit_lamb": lambda model, transport: MAKE["lamb"](
        model.named_parameters(), freeze_step=2, transport=transport
    ),
}


@pytest.mark.parametrize("name", MAKERS)
def test_nothing_is_compared_in_words_after_the_first_rounds(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    compared: list[int] = []
    step = 0
    compare = exchanges.compare_tensors

    def counted(segments: Any, ranks: Any) -> Any:
        compared.append(step)
        return compare(segments, ranks)

    monkeypatch.setattr(exchanges, "compare_tensors", counted)

    def train(transport: Transport) -> None:
        nonlocal step
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            model = nn.Sequential(nn.Linear(64, 256), nn.Tanh(), nn.Linear(256, 10))
        optimizer = MAKERS[name](model, transport)
        generator = torch.Generator().manual_seed(transport.rank)
        for step in range(24):  # noqa: B007
            model(torch.randn(8, 64, generator=generator)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()

    run_ranks(train, 2)
    assert compared
    assert max(compared) < 8
