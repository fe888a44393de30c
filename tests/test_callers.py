"""Warnings stand at a line of the program, whatever frameworks put between it and a step."""

import inspect

import pytest
import torch
from torch import nn

from comm_hooks import Exchange, Identity
from comm_hooks.collectives import Simulated
from comm_hooks.optim import LocalRounds


@pytest.mark.parametrize("is_scheduled", [False, True])
def test_a_step_warns_at_the_line_that_asks_for_it(is_scheduled: bool) -> None:
    """Accelerate silences what stands in torch's schedulers, which wrap step()."""
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
