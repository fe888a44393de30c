"""torch.compile before and after DDP, with its DDPOptimizer and without."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from comm_hooks import CompressionState, register
from tests.ranks import RanksOf
from tests.test_hook import gradients

SETTINGS: dict[str, Any] = {"density": 0.1, "block_size": 256}


def deep_net() -> nn.Module:
    """Return 3.7 MB of parameters: torch.compile cuts the graph where DDP cuts its buckets, which
    hold 1 MB at the least.
    """
    torch.manual_seed(0)
    layers = [part for _ in range(4) for part in (nn.Linear(480, 480), nn.Tanh())]
    return nn.Sequential(*layers, nn.Linear(480, 10))


def train(model: nn.Module, steps: range) -> list[dict[str, torch.Tensor]]:
    """Return the gradients of each step, in the order of the parameters."""
    history = []
    for step in steps:
        generator = torch.Generator().manual_seed(100 * step + dist.get_rank())
        model.zero_grad()
        model(torch.randn(8, 480, generator=generator)).square().mean().backward()
        history.append(gradients(model))
        with torch.no_grad():
            for parameter in model.parameters():
                parameter -= 0.5 * parameter.grad
    return history


def compiled(module: nn.Module) -> Any:
    return torch.compile(module, backend="aot_eager")


def after(net: nn.Module) -> tuple[nn.Module, CompressionState]:
    model = compiled(DistributedDataParallel(net, bucket_cap_mb=1))
    return model, register(model, "topk", **SETTINGS)


def before(net: nn.Module) -> tuple[nn.Module, CompressionState]:
    model = DistributedDataParallel(compiled(net), bucket_cap_mb=1)
    return model, register(model, "topk", **SETTINGS)


def in_place(net: nn.Module) -> tuple[nn.Module, CompressionState]:
    model = DistributedDataParallel(net, bucket_cap_mb=1)
    model.compile(backend="aot_eager")
    return model, register(model, "topk", **SETTINGS)


def not_at_all(net: nn.Module) -> tuple[nn.Module, CompressionState]:
    model = DistributedDataParallel(net, bucket_cap_mb=1)
    return model, register(model, "topk", **SETTINGS)


Wrap = Callable[[nn.Module], tuple[nn.Module, CompressionState]]


def compare(wrap: Wrap, optimize_ddp: bool) -> dict[str, Any]:
    """Train compiled and not; half-way hand the state from one to the other."""
    with torch._dynamo.config.patch(optimize_ddp=optimize_ddp):
        torch._dynamo.reset()
        (model, state), (plain, plain_state) = wrap(deep_net()), not_at_all(deep_net())
        ours, theirs = train(model, range(3)), train(plain, range(3))
        buckets = len(state.exchange.buckets)
        saved, plain_saved = state.state_dict(), plain_state.state_dict()
        state.load_state_dict(plain_saved)
        plain_state.load_state_dict(saved)
        ours += train(model, range(3, 5))
        theirs += train(plain, range(3, 5))
    return {
        "error": max(
            float((a - b).abs().max())
            for mine, other in zip(ours, theirs, strict=True)
            for a, b in zip(mine.values(), other.values(), strict=True)
        ),
        "buckets": buckets,
        "names": set(saved["memory"]) == set(plain_saved["memory"]) != set(),
        "steps": state.stats()["steps"],
    }


OTHERS: list[tuple[Wrap, bool]] = [(after, False), (before, True), (in_place, True)]


@pytest.mark.parametrize(
    ("wrap", "optimize_ddp"),
    [
        (after, True),
        *(pytest.param(*case, marks=pytest.mark.slow) for case in OTHERS),
    ],
)
def test_a_compiled_model_is_compressed_like_any_other(
    ranks_of: RanksOf, wrap: Wrap, optimize_ddp: bool
) -> None:
    for report in ranks_of(2).run(compare, wrap, optimize_ddp):
        # The compiled graph is the same arithmetic; top-k takes the same elements.
        assert report["error"] < 1e-7
        assert report["buckets"] >= 2
        assert report["names"], "the names must not depend on compilation"
        assert report["steps"] == 5
