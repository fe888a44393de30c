"""Training loops that know nothing of what carries their exchange."""

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn

from comm_hooks import ErrorFeedback, Exchange, Quantize, RandomK, Sign, TopK
from comm_hooks.collectives import Transport
from comm_hooks.optim import LocalRounds, OneBitAdam

STEPS = 6
EXCHANGES: dict[str, dict[str, Any]] = {
    "random_k": {"compressor": RandomK(density=0.5), "collective": "all_reduce"},
    "topk": {"compressor": TopK(density=0.1), "collective": "all_gather"},
    "quantize": {"compressor": Quantize(bits=4), "collective": "sharded"},
    "nodes": {
        "compressor": Quantize(bits=4),
        "collective": "hierarchical",
        "ranks_per_node": 1,
    },
}


OPTIMIZERS: dict[str, Callable[[Any, Exchange], Any]] = {
    "OneBitAdam": lambda named, exchange: OneBitAdam(named, exchange, lr=1e-2, freeze_step=2),
    "LocalRounds": lambda named, exchange: LocalRounds(
        torch.optim.AdamW(named, lr=1e-2), exchange, local_steps=2
    ),
}


def model_and_batches(rank: int) -> tuple[nn.Module, Iterable[torch.Tensor]]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(24, 48), nn.Tanh(), nn.Linear(48, 24))
    generator = torch.Generator().manual_seed(rank)
    return model, (torch.randn(8, 24, generator=generator) for _ in range(STEPS))


def weights(model: nn.Module) -> torch.Tensor:
    return nn.utils.parameters_to_vector(model.parameters()).detach()


def plain_loop(transport: Transport, name: str) -> dict[str, Any]:
    """Average gradients with nothing but an exchange."""
    model, batches = model_and_batches(transport.rank)
    settings = EXCHANGES[name]
    memory = ErrorFeedback() if name in ("topk", "quantize") else None
    exchange = Exchange(**settings, memory=memory, min_numel=64, transport=transport)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for batch in batches:
        optimizer.zero_grad()
        (model(batch) - batch).square().mean().backward()
        exchange.average_({n: p.grad for n, p in model.named_parameters() if p.grad is not None})
        optimizer.step()
    return {"weights": weights(model), "stats": exchange.stats()}


def optimizer_loop(transport: Transport, name: str) -> dict[str, Any]:
    """Let an optimizer own the exchange."""
    model, batches = model_and_batches(transport.rank)
    exchange = Exchange(Sign(), ErrorFeedback(), "sharded", min_numel=64, transport=transport)
    optimizer = OPTIMIZERS[name](list(model.named_parameters()), exchange)
    for batch in batches:
        optimizer.zero_grad()
        (model(batch) - batch).square().mean().backward()
        optimizer.step()
    return {"weights": weights(model), "stats": exchange.stats()}


def all_loops(transport: Transport) -> dict[str, dict[str, Any]]:
    results = {name: plain_loop(transport, name) for name in EXCHANGES}
    return {**results, **{name: optimizer_loop(transport, name) for name in OPTIMIZERS}}
