"""What travels beside the payload is exact, whatever the compressor and the settings are."""

import itertools
import warnings

import pytest
import torch
from torch import nn

from comm_hooks import (
    Compressor,
    CountSketch,
    ErrorFeedback,
    Exchange,
    PermK,
    Quantize,
    Sign,
    TopK,
)
from comm_hooks.collectives import Simulated, Transport, run_ranks
from comm_hooks.exchange import Collective
from comm_hooks.optim import SAFL, LocalRounds, Participation

EVERYTHING = {"min_ndim": 1, "min_numel": 1}


@pytest.mark.parametrize("granularity", ["parameter", "bucket"])
@pytest.mark.parametrize("exempt_bits", [16, 32])
@pytest.mark.parametrize(
    "compressor", [TopK(0.1, value_bits=1), Sign(), CountSketch(0.1), PermK(), Quantize(bits=2)]
)
def test_it_is_averaged_exactly(compressor: Compressor, exempt_bits: int, granularity: str) -> None:
    probe = Exchange(compressor, exempt_bits=exempt_bits)
    collectives: list[Collective] = ["hierarchical"]
    collectives += probe.settings.carriers()  # type: ignore[arg-type]
    for collective, ranks in itertools.product(collectives, (2, 4)):
        world = Simulated(ranks)
        nodes = {"ranks_per_node": ranks // 2} if collective == "hierarchical" else {}
        exchanges = [
            Exchange(
                compressor,
                collective=collective,
                exempt_bits=exempt_bits,
                granularity=granularity,  # type: ignore[arg-type]
                transport=transport,
                **EVERYTHING,
                **nodes,
            )
            for transport in world
        ]
        for step in range(2):
            tensors = [{"w": torch.randn(40, 40), "b": torch.randn(7)} for _ in world]
            counts = [{"counts": torch.tensor([rank * 1001.0, step, 1.0])} for rank in range(ranks)]
            expected = torch.stack([c["counts"] for c in counts]).mean(0)
            rounds = zip(exchanges, tensors, counts, strict=True)
            world.run([e.round(t, extras=c) for e, t, c in rounds])
            assert all(torch.equal(c["counts"], expected) for c in counts)


def small_model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 9), nn.Linear(9, 3))


@pytest.mark.parametrize(
    ("compressor", "granularity"),
    [(Sign(), "parameter"), (TopK(1 / 64, value_bits=1), "bucket"), (CountSketch(0.1), "bucket")],
)
def test_every_rank_counts_where_everything_is_compressed(
    compressor: Compressor, granularity: str
) -> None:
    def train(transport: Transport) -> list[int]:
        model = small_model()
        exchange = Exchange(
            compressor,
            None if compressor.linear else ErrorFeedback(),
            granularity=granularity,  # type: ignore[arg-type]
            transport=transport,
            **EVERYTHING,  # type: ignore[arg-type]
        )
        inner = torch.optim.SGD(model.parameters(), lr=0.01)
        rounds = LocalRounds(inner, exchange, local_steps=1)
        moved = []
        generator = torch.Generator().manual_seed(transport.rank)
        for _ in range(6):
            before = [p.detach().clone() for p in rounds.replica()]
            model(torch.randn(4, 6, generator=generator)).square().sum().backward()
            rounds.step()
            rounds.zero_grad()
            after = rounds.replica()
            moved.append(any(not torch.equal(a, b) for a, b in zip(before, after, strict=True)))
        return moved

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert run_ranks(train, 2) == [[True] * 6] * 2


def test_the_mean_over_fifty_clients_has_fifty_as_its_divisor() -> None:
    def train(transport: Transport) -> float:
        model = nn.Linear(1, 1, bias=False)
        nn.init.zeros_(model.weight)
        exchange = Exchange(CountSketch(ratio=0.5), transport=transport, **EVERYTHING)  # type: ignore[arg-type]
        rounds = SAFL(
            model.parameters(),
            exchange,
            lr=1.0,
            local_lr=1.0,
            betas=(0.0, 0.0),
            eps=1e3,
            participation=Participation(clients=50),
        )
        for _ in rounds.clients():
            # The gradient is 1, so is the delta of every client, and their mean.
            model(torch.ones(1, 1)).sum().backward()
            rounds.step()
            rounds.zero_grad()
        return float(model.weight.detach())

    for moved in run_ranks(train, 2):
        assert moved == pytest.approx(-1 / (1 + 1e3), rel=1e-5)
