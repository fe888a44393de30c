"""What a profile shows of an exchange."""

from collections import Counter
from typing import Any

import pytest
import torch
from torch._C._profiler import _ExperimentalConfig
from torch.nn.parallel import DistributedDataParallel
from torch.profiler import ProfilerActivity, profile

from comm_hooks import Exchange, Sign, TopK, profiling, register
from comm_hooks.optim import LocalVarianceAdam, low_communication
from tests.optim.scenarios import RanksOf

STEPS = 3
WORK = {profiling.COMPRESS, profiling.SEND, profiling.DECODE}


def model() -> torch.nn.Module:
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.ReLU(), torch.nn.Linear(64, 64))


def ranges_of(train: Any, *, all_threads: bool) -> Counter[str]:
    """Return how often each of our ranges is seen in three steps after the first."""
    train()
    config = _ExperimentalConfig(profile_all_threads=all_threads)
    with profile(activities=[ProfilerActivity.CPU], experimental_config=config) as seen:
        for _ in range(STEPS):
            train()
    names = [event.name for event in seen.events() or []]
    return Counter(name for name in names if name.startswith("comm_hooks::"))


def step(module: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
    optimizer.zero_grad()
    module(torch.randn(8, 64)).square().mean().backward()
    optimizer.step()


def behind_a_hook(collective: str) -> Counter[str]:
    ddp = DistributedDataParallel(model())
    register(ddp, "topk", collective=collective)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
    step(ddp, optimizer)  # DDP makes its buckets anew after the first
    return ranges_of(lambda: step(ddp, optimizer), all_threads=True)


@pytest.mark.parametrize(("collective", "sends"), [("all_gather", 1), ("sharded", 2)])
def test_a_hook_compresses_sends_waits_and_decodes(
    ranks_of: RanksOf, collective: str, sends: int
) -> None:
    for seen in ranks_of(2).run(behind_a_hook, collective):
        assert seen == {
            profiling.COMPRESS: sends * STEPS,
            profiling.SEND: sends * STEPS,
            profiling.DECODE: sends * STEPS,
            profiling.WAIT: STEPS,
        }


def in_an_optimizer(name: str) -> Counter[str]:
    module = model()
    parameters = module.named_parameters()
    if name == "rounds":
        optimizer: torch.optim.Optimizer = low_communication(parameters, lr=0.01)
    else:
        exchange = Exchange(Sign() if name == "sign" else TopK())
        optimizer = LocalVarianceAdam(parameters, exchange, lr=0.01)
    return ranges_of(lambda: step(module, optimizer), all_threads=False)


@pytest.mark.parametrize("name", ["sign", "topk", "rounds"])
def test_an_optimizer_compresses_sends_and_decodes(ranks_of: RanksOf, name: str) -> None:
    for seen in ranks_of(2).run(in_an_optimizer, name):
        assert seen.keys() == WORK
        assert name == "rounds" or seen[profiling.COMPRESS] >= STEPS
