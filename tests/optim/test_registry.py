"""One registry: names, options by signature, published exchanges."""

import inspect
from typing import Any

import pytest
import torch

import comm_hooks.optim
from comm_hooks import Exchange
from comm_hooks.collectives import Simulated
from comm_hooks.config import parse_spec
from comm_hooks.exchange import ExchangeSettings
from comm_hooks.optim.registry import OPTIMIZERS, Defaults, find, lookup


def parameters() -> list[tuple[str, torch.nn.Parameter]]:
    module = torch.nn.Sequential(torch.nn.Linear(40, 40), torch.nn.Linear(40, 4))
    return list(module.named_parameters())


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_every_optimizer_is_built_with_its_published_exchange(name: str) -> None:
    entry = OPTIMIZERS[name]
    world, exchange, own = Simulated(1), None, {}
    if entry.averages == "exchange":
        assert entry.published is not None
        exchange = Exchange(ExchangeSettings.from_dict(entry.published), transport=world[0])
    elif entry.averages == "own":
        own = {"transport": world[0], "bits_per_parameter": 8.0}
    training = Defaults(lr=2e-3, steps=200, warmup=20)
    assert entry.build(parameters(), exchange, defaults=training, **own)
    assert set(entry.needs) <= set(entry.published or ())


def test_every_public_optimizer_is_registered() -> None:
    # LocalRounds and Participation are what the others are made of.
    public = set(comm_hooks.optim.__all__) - {"LocalRounds", "Participation"}
    assert public <= {entry.type_name for entry in OPTIMIZERS.values()}


def test_case_and_underscores_do_not_matter() -> None:
    assert lookup("OneBitAdam") is lookup("onebitadam") is OPTIMIZERS["one_bit_adam"]
    assert lookup("mulo_co") is lookup("MuLoCo") is OPTIMIZERS["mu_lo_co"]
    assert lookup("adamm") is None
    with pytest.raises(ValueError, match="unknown optimizer 'one_bit_adm': did you mean 'one_bit"):
        find("one_bit_adm")


def test_options_are_those_of_the_signature() -> None:
    entry = OPTIMIZERS["one_bit_adam"]
    signature = inspect.signature(entry.make).parameters
    assert ["params", "exchange", *entry.options] == list(signature)
    assert entry.options["freeze_step"].is_required
    assert entry.options["lr"].default == 1e-3
    assert "phi" not in OPTIMIZERS["fed_lamb"].options  # a function
    assert "participation" not in OPTIMIZERS["fed_avg"].options


def test_defaults_follow_from_the_training() -> None:
    training = Defaults(lr=0.1, betas=(0.9, 0.95), weight_decay=0.2, steps=50, warmup=5)
    usual = OPTIMIZERS["one_bit_adam"].usual(training)
    assert (usual["freeze_step"], usual["total_steps"], usual["lr"]) == (5, 50, 0.1)
    adam = OPTIMIZERS["adam"].build(parameters(), defaults=training, beta1=0.5)
    assert adam.param_groups[0]["betas"] == (0.5, 0.95)
    assert adam.param_groups[0]["weight_decay"] == 0.2


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        (
            "diloco:local_stps=3",
            "option of diloco 'local_stps': did you mean 'local_steps'",
        ),
        ("diloco:local_steps=true", "diloco: local_steps must be an integer, got True"),
        ("safl:amsgrad=1", "safl: amsgrad must be true or false, got 1"),
        ("adam:lr=fast", "adam: lr must be a number, got 'fast'"),
        ({"type": "adam", "betas": 0.9}, "adam: betas must be two numbers, got 0.9"),
        ("dgc:clip_norm=x", "dgc: clip_norm must be a number or none, got 'x'"),
        ("marina:beta1=0.5", "unknown option of marina 'beta1'"),
    ],
)
def test_options_are_checked(spec: Any, message: str) -> None:
    name, options = parse_spec(spec)
    with pytest.raises(ValueError, match=message):
        find(name).check(options)
