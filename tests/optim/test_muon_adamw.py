"""Muon and AdamW as one optimizer take the steps that they take apart."""

from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import AdamW

from comm_hooks.optim import LaProp, MuonAdamW
from comm_hooks.optim.muon import Muon


def make_model() -> nn.ModuleDict:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        layers = {"tokens": nn.Embedding(11, 8), "mlp": nn.Linear(8, 6), "head": nn.Linear(6, 11)}
        return nn.ModuleDict(layers)


def backward(model: nn.ModuleDict, step: int) -> None:
    tokens = torch.randint(11, (16,), generator=torch.Generator().manual_seed(step))
    logits = model["head"](model["mlp"](model["tokens"](tokens)).relu())
    model.zero_grad()
    nn.functional.cross_entropy(logits, tokens).backward()


def values(model: nn.Module) -> list[torch.Tensor]:
    return [p.detach().clone() for p in model.parameters()]


@pytest.mark.parametrize("rest", [AdamW, LaProp])
def test_it_takes_the_steps_of_both(rest: Any) -> None:
    one, two = make_model(), make_model()
    together = MuonAdamW(one.named_parameters(), lr=0.02, rest=rest)
    hidden = [two["mlp"].weight]
    others = [p for p in two.parameters() if p is not hidden[0]]
    muon = Muon(hidden, lr=0.02)
    adamw = rest(others, lr=0.02, betas=(0.9, 0.95), weight_decay=0.1)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(together, 0.5)
    for step in range(4):
        for model in (one, two):
            backward(model, step)
        together.step()
        muon.step()
        adamw.step()
        scheduler.step()
        for optimizer in (muon, adamw):
            optimizer.param_groups[0]["lr"] *= 0.5
    assert all(map(torch.equal, values(one), values(two)))


def test_who_is_hidden_can_be_said() -> None:
    model = make_model()
    optimizer = MuonAdamW(
        model.named_parameters(), hidden=lambda name, p: name in ("mlp.weight", "head.weight")
    )
    assert optimizer.param_groups[0]["param_names"] == ["mlp.weight", "head.weight"]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"lr": -1.0}, "lr"),
        ({"momentum": 1.0}, "momentum"),
        ({"hidden": lambda name, p: False}, "no hidden matrix"),
        ({"hidden": lambda name, p: True}, "no other parameter"),
        ({"hidden": lambda name, p: name != "mlp.weight"}, "must be matrices"),
    ],
)
def test_what_cannot_be_is_said(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        MuonAdamW(make_model().named_parameters(), **options)
