"""What the ledger counts on cannot be changed behind its back."""

import itertools
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader

from comm_hooks import ErrorFeedback, Exchange, ExchangeSettings, RandomK, TopK
from comm_hooks.collectives import Simulated
from comm_hooks.compressors.identity import Identity
from comm_hooks.optim.private import (
    DPSGD,
    DPOptimizer,
    GaussianMechanism,
    PrivacyEngine,
    PrivacyError,
)
from tests.optim.private import test_tickets as tickets
from tests.optim.private.test_tickets import loss_function
from tests.optim.scenarios import RanksOf

pytestmark = [
    pytest.mark.filterwarnings("ignore:world size is 1"),
    pytest.mark.filterwarnings("ignore:Full backward hook is firing"),
]


def exchange_of(memory: ErrorFeedback | None = None) -> Exchange:
    return Exchange(TopK(density=0.5), memory, min_numel=1, transport=Simulated(1)[0])


def private(
    engine: PrivacyEngine, **settings: Any
) -> tuple[nn.Module, DPOptimizer, DataLoader[Any]]:
    return tickets.private(engine, **{"noise_multiplier": 1.0, "placement": "local", **settings})


def train(optimizer: DPOptimizer, loader: DataLoader[Any], steps: int = 2) -> None:
    for batch in itertools.islice(loader, steps):
        optimizer.backward(batch)
        optimizer.step()


SETTLED = {
    "mechanism": [
        *("noise_multiplier", "max_grad_norm", "expected_batch_size"),
        *("place", "verdict", "exchange"),
    ],
    "gradients": ["max_grad_norm", "parameters"],
    "": ["gradients", "mechanism"],
}


def test_settings_are_settled() -> None:
    _, optimizer, loader = private(PrivacyEngine(), exchange=exchange_of())
    train(optimizer, loader)
    settled = [(optimizer, n) for n in SETTLED[""]] + [(loader.batch_sampler, "sample_rate")]
    settled += [(getattr(optimizer, p), n) for p in ("mechanism", "gradients") for n in SETTLED[p]]
    for owner, name in settled:
        with pytest.raises(PrivacyError, match=r"engine\.change\(optimizer"):
            setattr(owner, name, 0.1)
    train(optimizer, loader)


CHANGED = {"settings": "compressor", "_transport": "transport"}


@pytest.mark.parametrize(
    ("part", "value"),
    [
        ("settings", ExchangeSettings(RandomK(density=0.5))),
        ("memory", ErrorFeedback()),
        ("memory", None),
        ("collective", "all_gather"),
        ("min_numel", 7),
        ("_transport", Simulated(1)[0]),
    ],
)
def test_an_exchange_that_was_changed_releases_nothing(part: str, value: Any) -> None:
    engine = PrivacyEngine()
    exchange = exchange_of(ErrorFeedback())
    model, optimizer, loader = private(engine, exchange=exchange)
    train(optimizer, loader)
    if part == "memory":
        exchange.state.memory = value
    elif hasattr(exchange, part):
        setattr(exchange, part, value)
    else:
        exchange.settings = replace(exchange.settings, **{part: value})
    before = [p.detach().clone() for p in model.parameters()]
    with pytest.raises(
        PrivacyError, match=f"was changed after it was judged: {CHANGED.get(part, part)}"
    ):
        train(optimizer, loader)
    with pytest.raises(PrivacyError, match="was changed after it was judged"):
        optimizer.mechanism.release({"weight": torch.zeros(3)})
    assert engine.state_dict()["events"][0]["steps"] == 2
    assert all(torch.equal(p, b) for p, b in zip(model.parameters(), before, strict=True))


def test_a_clipping_norm_that_is_not_the_noise_s_is_refused() -> None:
    engine = PrivacyEngine()
    _, optimizer, loader = private(engine)
    object.__setattr__(optimizer.gradients, "max_grad_norm", 10.0)
    with pytest.raises(PrivacyError, match=r"clipped to 10 and the noise is for 0\.1"):
        train(optimizer, loader)
    with pytest.raises(ValueError, match="no step has been taken"):
        engine.get_epsilon(1e-3)


@pytest.mark.parametrize("mode", ["functorch", "hooks"])
def test_a_change_is_in_the_ledger(mode: str) -> None:
    if mode == "hooks":
        pytest.importorskip("opacus")
    engine = PrivacyEngine()
    model, optimizer, loader = private(engine, grad_sample_mode=mode, sample_rate=1.0)

    def step() -> None:
        optimizer.backward(next(iter(loader)))
        optimizer.step()

    step()
    engine.change(optimizer, noise_multiplier=2.0)
    step()
    engine.change(optimizer, noise_multiplier=1e-6, max_grad_norm=1e-3, expected_batch_size=40)
    before = torch.cat([p.detach().flatten() for p in model.parameters()])
    step()
    moved = torch.cat([p.detach().flatten() for p in model.parameters()]) - before
    # Samples have gradients above this norm, and 40 of them cannot move the model further.
    assert 1e-5 < float(moved.norm()) <= 0.5 * 1e-3 * 40 / 40 * 1.01
    events = [(e["noise_multiplier"], e["steps"]) for e in engine.state_dict()["events"]]
    assert events == [(1.0, 1), (2.0, 1), (1e-6, 1)]


def test_a_change_in_the_middle_of_a_step_or_out_of_range() -> None:
    engine = PrivacyEngine()
    _, optimizer, loader = private(engine)
    optimizer.backward(next(iter(loader)))
    with pytest.raises(PrivacyError, match="changed only between steps, and backward"):
        engine.change(optimizer, max_grad_norm=1.0)
    optimizer.step()
    for value in (0.0, -1.0, float("inf"), float("nan")):
        with pytest.raises(ValueError, match=r"noise_multiplier must lie in \(0, inf\)"):
            engine.change(optimizer, noise_multiplier=value)
    train(optimizer, loader)
    assert engine.state_dict()["events"][0]["steps"] == 3


def change_on_rank() -> tuple[str, float]:
    engine = PrivacyEngine()
    _, optimizer, loader = private(engine)
    train(optimizer, loader)
    engine.change(optimizer, noise_multiplier=3.0)
    train(optimizer, loader)
    try:
        engine.change(optimizer, noise_multiplier=1.0 + dist.get_rank())
    except RuntimeError as error:
        return str(error), optimizer.mechanism.noise_multiplier
    return "", 0.0


def test_ranks_change_alike(ranks_of: RanksOf) -> None:
    for message, noise_multiplier in ranks_of(2).run(change_on_rank):
        assert "noise_multiplier is 1.0 on rank 0, 2.0 on rank 1" in message
        assert noise_multiplier == 3.0


def test_only_the_private_optimizer_steps() -> None:
    """After loss.backward(), p.grad holds the raw gradient."""
    module = nn.Linear(6, 3)
    usual = torch.optim.SGD(module.parameters(), lr=0.1)
    model, optimizer, loader = private(PrivacyEngine(), model=module, optimizer=usual)
    batches = iter(loader)
    for step in (usual.step, optimizer.inner.step):
        loss_function(model, next(batches)).sum().backward()
        before = [p.detach().clone() for p in model.parameters()]
        with pytest.raises(PrivacyError, match="a step of its own would not be in the ledger"):
            step()
        assert all(torch.equal(p, b) for p, b in zip(model.parameters(), before, strict=True))
        model.zero_grad()
    optimizer.zero_grad()


@pytest.mark.parametrize("place", ["central", "local"])
def test_an_exchange_that_remembers_clean_gradients_is_refused(place: Any) -> None:
    exchange = exchange_of(ErrorFeedback())
    exchange.average_({"weight": torch.randn(10, 10), "bias": torch.randn(10)})
    with pytest.raises(PrivacyError, match="has residuals"):
        private(PrivacyEngine(), exchange=exchange, placement=place)
    with pytest.raises(PrivacyError, match="has residuals"):
        GaussianMechanism(
            exchange,
            place=place,
            noise_multiplier=1.0,
            max_grad_norm=1.0,
            expected_batch_size=1.0,
        )
    # One that has nothing to remember with may have been used.
    used = Exchange(Identity(), transport=Simulated(1)[0])
    used.average_({"weight": torch.randn(100)})
    train(*private(PrivacyEngine(), exchange=used)[1:])


@pytest.mark.parametrize("mode", ["functorch", "hooks"])
def test_what_is_frozen_later_is_refused(mode: str) -> None:
    if mode != "functorch":
        pytest.importorskip("opacus")
    model, optimizer, loader = private(PrivacyEngine(), grad_sample_mode=mode)
    train(optimizer, loader)
    model.bias.requires_grad_(False)  # type: ignore[union-attr, operator]
    with pytest.raises(ValueError, match="requires_grad of 1 parameters has changed"):
        train(optimizer, loader)


def test_an_optimizer_may_hold_what_was_frozen_before() -> None:
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 3))
    model[0].requires_grad_(False)
    frozen, trained = model[0].weight.clone(), model[1].weight.clone()
    own = DPSGD(model.named_parameters(), lr=0.5, momentum=0.9)
    _, optimizer, loader = private(PrivacyEngine(), model=model, optimizer=own)
    train(optimizer, loader)
    assert torch.equal(frozen, model[0].weight)
    assert not torch.equal(trained, model[1].weight)
    model[0].requires_grad_(True)
    with pytest.raises(ValueError, match="requires_grad of 2 parameters has changed"):
        train(optimizer, loader)


@pytest.mark.parametrize("mode", ["functorch", "hooks"])
def test_a_head_that_is_replaced_later_is_refused(mode: str) -> None:
    """It would never be trained, while the budget is spent."""
    if mode != "functorch":
        pytest.importorskip("opacus")
    module = nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 3))
    _, optimizer, loader = private(PrivacyEngine(), model=module, grad_sample_mode=mode)
    train(optimizer, loader)
    module[1] = nn.Linear(6, 3)
    with pytest.raises(ValueError, match=r"1[.]weight' is another one, and 1 others"):
        train(optimizer, loader)
