"""Parameters that do not train stay as they are, are not sent, and are missed when they train."""

import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import Optimizer

from comm_hooks import ErrorFeedback, Exchange, Sign, TopK
from comm_hooks.collectives import Transport, run_ranks
from comm_hooks.errors import PayloadError
from comm_hooks.optim import LocalRounds, low_communication
from tests.optim.catalog import MAKE
from tests.optim.scenarios import rarely

Make = Callable[[Any, Transport], Any]


def low(params: Any, transport: Transport, **options: Any) -> Any:
    return low_communication(
        params, lr=0.01, bits_per_parameter=4.0, transport=transport, **options
    )


def rounds(params: Any, transport: Transport) -> Any:
    inner = torch.optim.AdamW(params, lr=0.01, weight_decay=0.1)
    exchange = Exchange(TopK(density=1 / 8), ErrorFeedback(), transport=transport, min_numel=8)
    return LocalRounds(inner, exchange, local_steps=2, shared_decay=True)


def owner(kind: str, **options: Any) -> Make:
    """Return an optimizer of the catalog, by its transport."""
    return lambda params, transport: MAKE[kind](params, transport=transport, **options)


signs = owner("lva", compressor=Sign())
MAKERS: dict[str, Make] = {
    "low_communication": low,
    "Muon": partial(low, inner="muon"),
    "LocalRounds": rounds,
    "LocalVarianceAdam": signs,
    "OneBitAdam": owner("one_bit", freeze_step=2),
    "OneBitLamb": owner("lamb", freeze_step=2),
    "FetchSGD": owner("fetch", density=0.1, collective="auto"),
}
USUAL = ("low_communication", "OneBitAdam")
OTHERS = rarely(*(name for name in MAKERS if name not in USUAL))
each = pytest.mark.parametrize("name", [*USUAL, *OTHERS])


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.backbone = nn.Linear(16, 16)
        self.middle = nn.Linear(16, 16)
        self.head = nn.Linear(16, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.middle(self.backbone(x).tanh()).tanh())


def net(*frozen: str) -> Net:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = Net()
    for name in frozen:
        getattr(model, name).requires_grad_(False)
    return model


def take_steps(model: nn.Module, optimizer: Optimizer, steps: range, rank: int) -> None:
    for step in steps:
        generator = torch.Generator().manual_seed(100 * step + rank)
        model(torch.randn(8, 16, generator=generator)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def copies(module: nn.Module) -> list[torch.Tensor]:
    return [p.detach().clone() for p in module.parameters()]


def same(first: list[torch.Tensor], second: list[torch.Tensor]) -> bool:
    return all(map(torch.equal, first, second))


@pytest.mark.parametrize(
    ("name", "in_groups"),
    [
        ("low_communication", True),
        ("OneBitAdam", False),
        *rarely(*((n, g) for n in MAKERS for g in (False, True) if n not in ("Muon", *USUAL))),
        *rarely(("Muon", False), ("low_communication", False), ("OneBitAdam", True)),
    ],
)
def test_frozen_layers_stay_and_cost_nothing(name: str, in_groups: bool) -> None:
    def train(transport: Transport, layers: list[str]) -> tuple[list[torch.Tensor], float]:
        model = net("backbone")
        groups = [
            {"params": [(f"{n}.{k}", p) for k, p in getattr(model, n).named_parameters()]}
            for n in layers
        ]
        named = [member for group in groups for member in group["params"]]
        optimizer = MAKERS[name](groups if in_groups else named, transport)
        before = copies(model.backbone)
        take_steps(model, optimizer, range(8), transport.rank)
        assert same(copies(model.backbone), before)
        assert not same(copies(model.middle), copies(net().middle))
        return copies(model), optimizer.exchange.stats()["bytes_sent"]

    with_all = run_ranks(lambda transport: train(transport, ["backbone", "middle", "head"]), 2)
    without = run_ranks(lambda transport: train(transport, ["middle", "head"]), 2)
    for (weights, sent), (others, others_sent) in zip(with_all, without, strict=True):
        assert same(weights, others)
        assert sent == others_sent > 0


@each
def test_what_is_unfrozen_later_is_missed(name: str) -> None:
    def train(transport: Transport) -> None:
        model = net("backbone")
        optimizer = MAKERS[name](model.named_parameters(), transport)
        take_steps(model, optimizer, range(2), transport.rank)
        model.backbone.requires_grad_(True)
        with pytest.raises(ValueError, match="2 parameters that were frozen when it was made"):
            take_steps(model, optimizer, range(2, 3), transport.rank)

    run_ranks(train, 2)


def test_what_is_unfrozen_and_added_is_trained() -> None:
    def train(transport: Transport) -> list[torch.Tensor]:
        model = net("backbone")
        optimizer = signs(model.named_parameters(), transport)
        take_steps(model, optimizer, range(2), transport.rank)
        before = copies(model.backbone)
        model.backbone.requires_grad_(True)
        added = [(f"backbone.{n}", p) for n, p in model.backbone.named_parameters()]
        optimizer.add_param_group({"params": added, "lr": 0.02})
        take_steps(model, optimizer, range(2, 6), transport.rank)
        assert not same(copies(model.backbone), before)
        return copies(model)

    first, second = run_ranks(train, 2)
    assert same(first, second)


def test_what_is_added_frozen_is_left_out() -> None:
    def train(transport: Transport) -> None:
        model = net()
        head, rest = (
            [(n, p) for n, p in model.named_parameters() if (n[:4] == "head") == own]
            for own in (True, False)
        )
        optimizer = signs(head, transport)
        model.middle.requires_grad_(False)
        before = copies(model.middle)
        optimizer.add_param_group({"params": rest, "weight_decay": 0.5})
        take_steps(model, optimizer, range(3), transport.rank)
        assert same(copies(model.middle), before)
        with pytest.raises(ValueError, match="the parameters are frozen"):
            optimizer.add_param_group({"params": [("z", nn.Parameter(torch.ones(2), False))]})
        model.middle.requires_grad_(True)
        with pytest.raises(ValueError, match="parameters that were frozen when it was made"):
            take_steps(model, optimizer, range(3, 4), transport.rank)

    run_ranks(train, 2)


@each
def test_what_is_frozen_later_is_told_of_once(name: str) -> None:
    def train(transport: Transport) -> list[str]:
        model = net()
        optimizer = MAKERS[name](model.named_parameters(), transport)
        take_steps(model, optimizer, range(2), transport.rank)
        model.middle.requires_grad_(False)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            take_steps(model, optimizer, range(2, 8), transport.rank)
        return [str(w.message) for w in caught if "were frozen after" in str(w.message)]

    # Threads share what is caught.
    assert 1 <= len(max(run_ranks(train, 2), key=len)) <= 2


def test_shared_decay_spares_what_is_frozen_later() -> None:
    def train(transport: Transport) -> None:
        model = net()
        optimizer = rounds(model.named_parameters(), transport)
        take_steps(model, optimizer, range(2), transport.rank)
        model.middle.requires_grad_(False)
        optimizer.exchange.memory.load_state_dict({})
        before = copies(model.middle)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            take_steps(model, optimizer, range(2, 6), transport.rank)
        assert same(copies(model.middle), before)

    run_ranks(train, 2)


@each
def test_what_only_one_rank_freezes_makes_no_two_models(name: str) -> None:
    def train(transport: Transport) -> list[torch.Tensor] | str:
        model = net()
        optimizer = MAKERS[name](model.named_parameters(), transport)
        take_steps(model, optimizer, range(3), transport.rank)
        model.middle.requires_grad_(transport.rank != 1)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            try:
                take_steps(model, optimizer, range(3, 9), transport.rank)
            except PayloadError as error:
                return str(error)
        if isinstance(optimizer, LocalRounds):
            optimizer.synchronize()
        return copies(model)

    first, second = run_ranks(train, 2)
    if isinstance(first, str):
        assert "or trains other parameters" in first
        assert first == second
    else:
        assert same(first, second)


@each
def test_nothing_that_trains(name: str) -> None:
    def train(transport: Transport) -> None:
        model = net("backbone", "middle", "head")
        with pytest.raises(ValueError, match="frozen"):
            MAKERS[name](model.named_parameters(), transport)

    run_ranks(train, 2)
