"""Steps that exchange, inside of ``torch.compile``: they run as if it were not there."""

import pytest
import torch
from torch import nn

from comm_hooks import ErrorFeedback, Exchange, TopK
from comm_hooks.collectives import Simulated
from comm_hooks.optim import LocalVarianceAdam, low_communication

KINDS = {
    "rounds": lambda params, transport: low_communication(
        params, lr=1e-2, bits_per_parameter=4.0, transport=transport
    ),
    "every step": lambda params, transport: LocalVarianceAdam(
        params, Exchange(TopK(), ErrorFeedback(), transport=transport), lr=1e-2
    ),
}


@pytest.mark.filterwarnings("ignore:world size is 1")
@pytest.mark.parametrize("name", KINDS)
def test_a_compiled_step_does_what_it_does_otherwise(name: str) -> None:
    ends = []
    for compiled in (False, True):
        torch.manual_seed(0)
        model = nn.Linear(64, 64)
        optimizer = KINDS[name](list(model.named_parameters()), Simulated(1)[0])
        step = torch.compile(optimizer.step, backend="eager") if compiled else optimizer.step
        for _ in range(3):
            model(torch.ones(2, 64)).square().sum().backward()
            step()
            optimizer.zero_grad()
        ends.append(model.weight.detach().clone())
    assert torch.equal(*ends)
