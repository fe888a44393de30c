"""MicroAdam's window: its bytes, and windows of other sizes; see test_references."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from comm_hooks import ErrorFeedback, Exchange, TopK
from comm_hooks.optim import MicroAdam
from tests.optim.catalog import MAKE
from tests.optim.replicas import fresh
from tests.optim.scenarios import RanksOf


def kept_bytes(collective: str, value_bits: int) -> float:
    model = nn.Sequential(*[nn.Linear(256, 256, bias=False) for _ in range(16)])
    torch.manual_seed(dist.get_rank())
    exchange = Exchange(
        TopK(0.01, value_bits=value_bits), ErrorFeedback(bits=4, stochastic=True), collective
    )
    optimizer = MicroAdam(model.named_parameters(), exchange, lr=1e-3, window=10)
    for _ in range(2):
        for parameter in model.parameters():
            parameter.grad = torch.randn_like(parameter)
        optimizer.step()

    def count(state: Any) -> int:
        if isinstance(state, torch.Tensor):
            return state.nbytes
        return sum(map(count, state.values())) if isinstance(state, dict) else 0

    kept = count(optimizer.state_dict()["state"]) + count(exchange.state_dict())
    return kept / sum(p.numel() for p in model.parameters())


@pytest.mark.filterwarnings("ignore:world size is 1")
@pytest.mark.parametrize(
    ("ranks", "collective", "value_bits", "most"),
    [(1, "all_gather", 16, 0.85), (1, "all_gather", 4, 0.70), (2, "sharded", 4, 0.97)],
)
def test_takes_less_than_a_byte_per_parameter(
    ranks_of: RanksOf, ranks: int, collective: str, value_bits: int, most: float
) -> None:
    assert max(ranks_of(ranks).run(kept_bytes, collective, value_bits)) <= most


def load_with_another_window() -> str:
    parameters = fresh()
    optimizer = MAKE["micro_32"](parameters.items())
    for parameter in parameters.values():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    other = MAKE["micro_32"](parameters.items(), window=5)
    other.load_state_dict(optimizer.state_dict())
    before = {n: p.detach().clone() for n, p in parameters.items()}
    with pytest.raises(ValueError, match="a loaded window has the shape") as refused:
        other.step()
    assert all(torch.equal(before[n], p) for n, p in parameters.items())
    assert other.exchange.step == 0
    return str(refused.value)


def test_a_window_of_another_size_is_refused(ranks_of: RanksOf) -> None:
    assert all(
        "saved with other settings" in text for text in ranks_of(2).run(load_with_another_window)
    )
