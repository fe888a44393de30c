"""Every optimizer that can be compared trains the model of the comparison, on real ranks."""

import math
from typing import Any

import pytest
import torch
import torch.distributed as dist

from benchmarks.lab.methods import parse_method
from benchmarks.lab.model import GPTConfig
from benchmarks.lab.runs import Settings
from benchmarks.lab.tasks.whole_text import whole_text
from benchmarks.lab.worker import connect, train
from comm_hooks.optim.registry import OPTIMIZERS
from tests.ranks import RanksOf

SETTINGS = Settings(
    steps=6,
    warmup=2,
    eval_every=3,
    batch=2,
    eval_windows=4,
    model=GPTConfig(layers=2, width=32, heads=2, context=16),
)
USUAL = ("adamw", "low_communication", "local_variance_adam", "one_bit_adam", "safl")


def run(spec: str) -> tuple[list[float], dict[str, float]]:
    text = torch.randint(32, 127, (4000,), generator=torch.Generator().manual_seed(1))
    events: list[dict[str, Any]] = []
    client = connect(parse_method(spec), SETTINGS)
    train(client, whole_text(text.to(torch.uint8), SETTINGS), SETTINGS, events.append)
    dist.barrier()
    return [e["loss"] for e in events if e["event"] == "point"], events[-1]


@pytest.mark.parametrize(
    "name",
    [
        *USUAL,
        *(pytest.param(n, marks=pytest.mark.slow) for n in OPTIMIZERS if n not in USUAL),
    ],
)
def test_it_trains_and_replicas_agree_at_the_end(ranks_of: RanksOf, name: str) -> None:
    outcomes = ranks_of(2).run(run, name)
    assert outcomes[0][0] == outcomes[1][0]
    losses, figures = outcomes[0]
    assert len(losses) == 2
    assert all(math.isfinite(loss) for loss in losses)
    assert figures["drift"] == 0
    assert figures["bytes_sent"] > 0
