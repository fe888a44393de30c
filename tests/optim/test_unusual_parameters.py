"""Parameters that torch's own optimizers train as well: views, empty ones, names, groups."""

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import Optimizer

from comm_hooks import ErrorFeedback, Exchange, Identity, Sign
from comm_hooks.collectives import Simulated
from comm_hooks.compressors import Compressor
from comm_hooks.optim import (
    LaProp,
    LocalRounds,
    LocalVarianceAdam,
    MuonAdamW,
    low_communication,
)
from tests.compressors.catalog import ALL
from tests.optim import catalog
from tests.optim.scenarios import rarely

Make = Callable[[Any], Optimizer]
LR = 0.01


@pytest.fixture(autouse=True)
def _alone() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="world size is 1")
        yield


def exchange() -> Exchange:
    return Exchange(Identity(), transport=Simulated(1)[0])


def rounds(params: Any, **options: Any) -> LocalRounds:
    return low_communication(
        params, lr=LR, bits_per_parameter=8.0, transport=Simulated(1)[0], **options
    )


MAKE: dict[str, Make] = {
    "LaProp": lambda params: LaProp(params, lr=LR),
    "LocalVarianceAdam": lambda params: LocalVarianceAdam(params, exchange(), lr=LR),
    "LocalRounds": lambda params: LocalRounds(
        torch.optim.AdamW(params, lr=LR), exchange(), local_steps=2
    ),
    "low_communication": rounds,
}
# These freeze or add up something of all parameters at once.
FROZEN: dict[str, Make] = {
    name: partial(catalog.MAKE[kind], transport=Simulated(1)[0], **options)
    for name, kind, options in (
        ("OneBitAdam", "one_bit", {"freeze_step": 2}),
        ("OneBitLamb", "lamb", {"freeze_step": 2}),
        ("ZeroOneAdam", "zero_one", {"var_freeze_step": 2}),
        ("FetchSGD", "fetch", {"collective": "auto", "density": 0.1}),
    )
}


def take_steps(optimizer: Optimizer, parameters: list[nn.Parameter], steps: int = 6) -> None:
    for step in range(steps):
        for place, p in enumerate(parameters):
            generator = torch.Generator().manual_seed(100 * step + place)
            p.grad = torch.randn(p.shape, generator=generator, dtype=p.dtype)
        optimizer.step()


@pytest.mark.parametrize("name", MAKE)
def test_a_parameter_that_is_a_part_of_a_larger_tensor(name: str) -> None:
    whole = torch.randn(64, 64, generator=torch.Generator().manual_seed(0))
    around = whole.clone()
    views = [whole[:, :32], whole.t()[40:, :8]]
    trained = []
    for values in (views, [view.contiguous() for view in views]):
        parameters = [nn.Parameter(value) for value in values]
        take_steps(MAKE[name](parameters), parameters)
        trained.append(torch.cat([p.detach().flatten() for p in parameters]))
    # Two displacements that differ by rounding alone may take each other's place among the largest.
    ties = {"atol": LR, "rtol": 0.0} if name == "low_communication" else {}
    torch.testing.assert_close(*trained, **ties)
    around[:, :32], around[:8, 40:] = whole[:, :32], whole[:8, 40:]
    assert torch.equal(whole, around), "what is beside them was overwritten"


@pytest.mark.parametrize("name", [name for name in MAKE if name != "LaProp"])
def test_parameters_without_elements_are_left_out(name: str) -> None:
    parameters = [nn.Parameter(torch.ones(shape)) for shape in ((0, 4), (8, 8), (0,))]
    optimizer = MAKE[name]([(str(i), p) for i, p in enumerate(parameters)])
    take_steps(optimizer, parameters)
    assert not torch.equal(parameters[1], torch.ones(8, 8))
    optimizer.load_state_dict(optimizer.state_dict())


@pytest.mark.parametrize("name", [name for name in MAKE if name != "LaProp"])
def test_two_parameters_of_one_name_are_refused(name: str) -> None:
    one, other = nn.Linear(8, 8), nn.Linear(8, 8)
    with pytest.raises(ValueError, match=r"2 parameters have the name 'bias': .* one module"):
        MAKE[name]([*one.named_parameters(), *other.named_parameters()])
    groups = [{"params": list(module.named_parameters())} for module in (one, other)]
    with pytest.raises(ValueError, match="2 parameters have the name 'bias'"):
        MAKE[name](groups)
    MAKE[name](nn.ModuleDict({"one": one, "other": other}).named_parameters())


def test_a_group_of_a_name_that_is_taken_is_refused() -> None:
    optimizer = MAKE["LocalVarianceAdam"](nn.Linear(8, 8).named_parameters())
    with pytest.raises(ValueError, match="2 parameters have the name"):
        optimizer.add_param_group({"params": list(nn.Linear(8, 8).named_parameters())})
    assert len(optimizer.param_groups) == 1


@pytest.mark.parametrize("name", FROZEN)
def test_what_has_measured_something_of_all_parameters_takes_no_others(name: str) -> None:
    model = nn.ModuleDict({"one": nn.Linear(8, 8), "other": nn.Linear(8, 8)})
    one, other = (list(model[key].named_parameters(key)) for key in model)
    optimizer = FROZEN[name](one)
    take_steps(optimizer, [p for _, p in one], 1)
    with pytest.raises(ValueError, match=rf"{name}: parameters cannot be added after the first"):
        optimizer.add_param_group({"params": other})
    before = FROZEN[name](one)
    before.add_param_group({"params": other})
    start = [p.detach().clone() for p in model.parameters()]
    take_steps(before, list(model.parameters()))
    assert not any(map(torch.equal, start, model.parameters()))


def test_muon_keeps_what_its_one_group_says() -> None:
    named = list(nn.Sequential(*(nn.Linear(8, 8) for _ in range(3))).named_parameters())
    group = {"params": named, "lr": 0.05, "betas": (0.8, 0.9), "weight_decay": 0.0}
    made = rounds([group], inner="muon")
    assert isinstance(made.inner, MuonAdamW)
    assert {(g["lr"], g["weight_decay"]) for g in made.param_groups} == {(0.05, 0.0)}
    assert [(g["betas"], g["horizon"]) for g in made.param_groups if "betas" in g] == [
        ((0.8, 0.9), 0.5)
    ]


def test_names_are_those_without_compilation() -> None:
    model = nn.Sequential(nn.Linear(8, 8))
    saved = []
    for module in (model, torch.compile(model, backend="eager")):
        optimizer = rounds(module.named_parameters())
        take_steps(optimizer, list(model.parameters()))
        saved.append(optimizer.state_dict())
    rounds(model.named_parameters()).load_state_dict(saved[1])
    with pytest.raises(ValueError, match=r"'0.weight' has the shape \(8, 8\) in the state, absent"):
        rounds([("a", p) for p in nn.Linear(8, 8).parameters()][:1]).load_state_dict(saved[0])


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (lambda m: set(m.parameters()), "an order that is the same on all ranks, got a set"),
        (lambda m: [{"params": set(m.parameters())}], "an order that is the same"),
        (lambda m: dict(m.named_parameters()), "a list of parameters or of groups, got dict"),
        (lambda m: m.weight, "a list of parameters or of groups, got Parameter"),
        (
            lambda m: [{"params": m.parameters(), "betas": 0.9}],
            "betas must be a tuple of 2 numbers",
        ),
    ],
)
def test_what_is_no_list_of_parameters_is_refused(
    given: Callable[[nn.Module], Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        rounds(given(nn.Linear(8, 8)))


@contextmanager
def float64_by_default() -> Iterator[None]:
    torch.set_default_dtype(torch.float64)
    try:
        yield
    finally:
        torch.set_default_dtype(torch.float32)


@pytest.mark.parametrize("compressor", [Sign(), *rarely(*ALL)], ids=repr)
def test_compressors_do_not_ask_for_the_default_dtype(compressor: Compressor) -> None:
    def exchanged() -> list[torch.Tensor]:
        world = Simulated(3)
        memory = ErrorFeedback if compressor.contractive else lambda: None
        exchanges = [Exchange(compressor, memory(), transport=t, min_numel=1) for t in world]
        generator = torch.Generator().manual_seed(0)
        gradients = [
            {"w": torch.randn(40, 50, generator=generator, dtype=torch.float32)} for _ in world
        ]
        for _ in range(2):
            world.run([e.round(g) for e, g in zip(exchanges, gradients, strict=True)])
        return [gradient["w"] for gradient in gradients]

    expected = exchanged()
    with float64_by_default():
        for value, other in zip(exchanged(), expected, strict=True):
            assert torch.equal(value, other)


@pytest.mark.parametrize("name", [*MAKE, *rarely(*FROZEN, "muon")])
def test_optimizers_do_not_ask_for_the_default_dtype(name: str) -> None:
    make = {**MAKE, **FROZEN, "muon": lambda params: rounds(params, inner="muon")}[name]

    def trained() -> torch.Tensor:
        generator = torch.Generator().manual_seed(0)
        parameters = [
            nn.Parameter(torch.randn(16, 16, generator=generator, dtype=torch.float32))
            for _ in range(3)
        ]
        parameters.append(nn.Parameter(torch.ones(8, dtype=torch.float32)))
        take_steps(make([(f"p{i}", p) for i, p in enumerate(parameters)]), parameters)
        return torch.cat([p.detach().flatten() for p in parameters])

    expected = trained()
    with float64_by_default():
        assert trained().dtype == torch.float32
        torch.testing.assert_close(trained(), expected)
