"""Warnings stand at the program's line, and one is about compressors in front of Adam."""

import inspect
import warnings
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from comm_hooks import Compressor, CountSketch, Exchange, Identity, Quantize, Sign, TopK, register
from comm_hooks.collectives import Simulated
from comm_hooks.optim import Adam, LocalRounds
from comm_hooks.warnings import misleads
from tests.ranks import RanksOf


@pytest.mark.parametrize("is_scheduled", [False, True])
def test_a_step_warns_at_the_line_that_asks_for_it(is_scheduled: bool) -> None:
    """Accelerate silences warnings in torch's schedulers, which wrap step()."""
    model = nn.Linear(4, 4)
    inner = torch.optim.SGD(model.parameters(), lr=0.1)
    exchange = Exchange(Identity(), transport=Simulated(1)[0])
    rounds = LocalRounds(inner, exchange, local_steps=4)
    if is_scheduled:
        torch.optim.lr_scheduler.LambdaLR(rounds, lambda step: 1.0)
    model(torch.ones(1, 4)).sum().backward()
    rounds.step()
    rounds.load_state_dict(rounds.state_dict())
    with torch.no_grad():
        model.weight.add_(1.0)
    with pytest.warns(UserWarning, match="written to after load_state_dict") as caught:
        rounds.step()
    source = inspect.getsource(test_a_step_warns_at_the_line_that_asks_for_it).splitlines()
    first = test_a_step_warns_at_the_line_that_asks_for_it.__code__.co_firstlineno
    (place,) = {(w.filename, source[w.lineno - first].strip()) for w in caught}
    assert place == (__file__, "rounds.step()")


class FusedAdam(torch.optim.SGD):
    """Named as optimizers of other packages are."""


@pytest.mark.parametrize(
    ("compressor", "reason"),
    [
        (TopK(density=1 / 64), "pulses"),
        (Sign(), "signs erase"),
        (TopK(density=1.0), None),
        (CountSketch(ratio=0.05), None),
        (Quantize(bits=4), None),
    ],
)
def test_adam_and_its_kin(compressor: Compressor, reason: str | None) -> None:
    for kind in (torch.optim.AdamW, FusedAdam, Adam):
        found = misleads(compressor, kind([nn.Parameter(torch.zeros(2))], lr=1e-3))
        assert found is None if reason is None else reason in str(found)
    assert misleads(compressor, torch.optim.SGD([nn.Parameter(torch.zeros(2))], lr=0.1)) is None


def warned() -> dict[tuple[str, str, bool], list[str]]:
    """Return the warnings in three steps, on the hooked model or on another one."""
    found = {}
    for case in (
        ("topk", "AdamW", False),
        ("topk", "SGD", False),
        ("count_sketch", "AdamW", False),
        ("topk", "AdamW", True),
    ):
        compressor, kind, elsewhere = case
        ddp = DistributedDataParallel(nn.Linear(64, 64))
        register(ddp, compressor)
        stepping: Any = nn.Linear(64, 64) if elsewhere else ddp
        optimizer = getattr(torch.optim, kind)(stepping.parameters(), lr=1e-3)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            for _ in range(3):
                stepping(torch.ones(2, 64)).square().sum().backward()
                optimizer.step()
                optimizer.zero_grad()
        messages = [str(w.message) for w in caught]
        found[case] = [message for message in messages if "no exchange at all" in message]
    return found


def test_a_hook_warns_at_the_first_step(ranks_of: RanksOf) -> None:
    for found in ranks_of(2).run(warned):
        (message,) = found.pop(("topk", "AdamW", False))
        assert "TopK in front of AdamW can end worse" in message
        assert "low_communication" in message
        assert not any(found.values())
