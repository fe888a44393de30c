"""OneBitAdam where it has no second moment; see test_references."""

import pytest
import torch
from torch import nn

from comm_hooks import ErrorFeedback, Exchange, Sign
from comm_hooks.optim import OneBitAdam
from tests.optim.scenarios import RanksOf


def move_late_rows(eps: float) -> list[float]:
    """Return how far rows move of which the first has no gradient during the warm-up."""
    table = nn.Parameter(torch.ones(4, 64))
    exchange = Exchange(Sign(block_size=256), ErrorFeedback(), min_numel=16)
    optimizer = OneBitAdam([("table", table)], exchange, lr=1e-3, eps=eps, freeze_step=2)
    for step in range(12):
        table.grad = torch.ones(4, 64)
        table.grad[0] = float(step > 5)
        optimizer.step()
    return [float(row.detach().sub(1).abs().max()) for row in table]


@pytest.mark.parametrize("eps", [0.0, 1e-8])
def test_coordinates_without_a_second_moment_stay(ranks_of: RanksOf, eps: float) -> None:
    for first, *others in ranks_of(2).run(move_late_rows, eps):
        assert first == 0
        assert min(others) > 1e-2
