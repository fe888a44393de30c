"""A private exchange carries out the rounds of its engine, and no others."""

from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from comm_hooks import ErrorFeedback, Exchange, TopK
from comm_hooks.collectives import Simulated
from comm_hooks.exchange.sparse import average_sparse
from comm_hooks.optim import FedAvg
from comm_hooks.optim.private import DPAdam, PrivacyEngine, PrivacyError

RAW = {"raw": torch.ones(64, 64)}
WAYS: dict[str, Callable[[Exchange], object]] = {
    "average_": lambda exchange: exchange.average_(dict(RAW)),
    "round": lambda exchange: exchange.transport.run(exchange.round(dict(RAW))),
    "uncompressed": lambda exchange: exchange.average_(dict(RAW), compress=False),
    "sparse": lambda exchange: average_sparse(exchange, torch.eye(4).to_sparse()).wait(),
    "shards": lambda exchange: exchange.transport.run(
        exchange.reduce_scatter_round(
            [exchange.buckets.of(dict(RAW))], [[torch.ones(64, 64)]], [torch.ones(64, 64)]
        )
    ),
}


def private_exchange(of_clients: bool) -> Exchange:
    torch.manual_seed(0)
    model = nn.Linear(16, 4)
    engine = PrivacyEngine()
    if of_clients:
        exchange = Exchange(TopK(density=0.5), ErrorFeedback(), transport=Simulated(1)[0])
        draw = engine.private_participation(
            clients=4, sample_rate=0.5, noise_multiplier=1.0, max_norm=1.0
        )
        rounds = FedAvg(model.named_parameters(), exchange, participation=draw)
        for _ in rounds.clients():
            model(torch.ones(1, 16)).sum().backward()
            rounds.step()
            rounds.zero_grad()
        return exchange
    exchange = Exchange(TopK(density=0.5), ErrorFeedback(), transport=Simulated(1)[0])
    model, optimizer, loader = engine.make_private(
        module=model,
        optimizer=DPAdam(model.named_parameters(), lr=0.1),
        data_loader=DataLoader(TensorDataset(torch.randn(50, 16))),
        loss_function=lambda model, batch: model(*batch).square().mean(1),
        noise_multiplier=1.0,
        max_grad_norm=1.0,
        sample_rate=0.1,
        expected_batch_size=5,
        placement="local",
        exchange=exchange,
    )
    optimizer.backward(next(iter(loader)))
    optimizer.step()
    return exchange


@pytest.mark.filterwarnings("ignore:world size is 1")
@pytest.mark.parametrize("of_clients", [False, True])
@pytest.mark.parametrize("way", WAYS)
def test_raw_values_are_not_sent(way: str, of_clients: bool) -> None:
    exchange = private_exchange(of_clients)
    before = exchange.step
    with pytest.raises(PrivacyError, match="belongs to private training"):
        WAYS[way](exchange)
    assert exchange.step == before
