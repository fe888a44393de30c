"""A compressor that misleads the optimizer behind it is told of, once, and no other is."""

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from comm_hooks import Compressor, CountSketch, Identity, Quantize, RandomK, Sign, TopK, register
from comm_hooks.frameworks.adaptive import misleads
from comm_hooks.optim import Adam, FrozenVarianceAdam
from tests.ranks import Ranks

RanksOf = Callable[[int], Ranks]


class FusedAdam(torch.optim.SGD):
    """Named as optimizers of other packages are."""


@pytest.mark.parametrize(
    ("compressor", "reason"),
    [
        (TopK(density=1 / 64), "pulses"),
        (RandomK(density=1 / 64), "pulses"),
        (Sign(), "signs erase"),
        (TopK(density=1.0), None),
        (CountSketch(ratio=0.05), None),
        (Quantize(bits=4), None),
        (Identity(bits=16), None),
    ],
)
@pytest.mark.parametrize("kind", [torch.optim.AdamW, torch.optim.NAdam, FusedAdam, Adam])
def test_adam_and_its_kin(compressor: Compressor, reason: str | None, kind: Any) -> None:
    optimizer = kind([nn.Parameter(torch.zeros(2))], lr=1e-3)
    found = misleads(compressor, optimizer)
    assert found is None if reason is None else reason in str(found)
    assert misleads(compressor, torch.optim.SGD([nn.Parameter(torch.zeros(2))], lr=0.1)) is None


def test_a_second_moment_that_stands_still_is_not_misled() -> None:
    optimizer = FrozenVarianceAdam([nn.Parameter(torch.zeros(2))], freeze_step=10)
    assert misleads(Sign(), optimizer) is None
    assert misleads(TopK(density=1 / 64), optimizer) is None


def warned(compressor: str, kind: str, elsewhere: bool) -> list[str]:
    """Return what three steps warn of, on the hooked model or on another one."""
    model, other = nn.Linear(64, 64), nn.Linear(64, 64)
    ddp = DistributedDataParallel(model)
    register(ddp, compressor)
    stepping = other if elsewhere else ddp
    optimizer = getattr(torch.optim, kind)(stepping.parameters(), lr=1e-3)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(3):
            stepping(torch.ones(2, 64)).square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()
    return [str(w.message) for w in caught if "no exchange at all" in str(w.message)]


@pytest.mark.parametrize(
    ("compressor", "kind", "elsewhere", "count"),
    [
        ("topk", "AdamW", False, 1),
        ("sign", "Adam", False, 1),
        ("topk", "SGD", False, 0),
        ("count_sketch", "AdamW", False, 0),
        ("topk", "AdamW", True, 0),
    ],
)
def test_a_hook_warns_at_the_first_step(
    ranks_of: RanksOf, compressor: str, kind: str, elsewhere: bool, count: int
) -> None:
    for messages in ranks_of(2).run(warned, compressor, kind, elsewhere):
        assert len(messages) == count
        for message in messages:
            assert f" in front of {kind} can end worse" in message
            assert "low_communication" in message
