"""What is released is a private step's, and nothing else changes what it trains."""

import gc
import warnings
import weakref
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from comm_hooks import Exchange, register
from comm_hooks.collectives import Simulated
from comm_hooks.compressors.identity import Identity
from comm_hooks.optim import FedAvg
from comm_hooks.optim.private import DPSGD, ClippedSum, PrivacyEngine, PrivacyError, witness
from tests.optim.private.test_tickets import dataset, forever, loss_function, private

MODES = ["functorch", "hooks"]


def raw_step(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Take an ordinary step on data that are private."""
    optimizer.zero_grad()
    with torch.enable_grad():
        loss = loss_function(model, dataset()[:4]).sum()
    parameters = list(model.parameters())
    for parameter, gradient in zip(parameters, torch.autograd.grad(loss, parameters), strict=True):
        parameter.grad = gradient
    optimizer.step()


@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.AdamW, DPSGD])
@pytest.mark.parametrize("part", ["all", "some"])
def test_another_optimizer_of_the_parameters_is_refused(kind: Any, part: str) -> None:
    model, optimizer, loader = private()
    batches = forever(loader)
    other = kind(model.parameters() if part == "all" else [model.bias], lr=0.1)
    before = model.weight.clone()
    with pytest.raises(PrivacyError, match="has the parameters of a DPOptimizer"):
        raw_step(model, other)
    with pytest.raises(PrivacyError, match="is inside a DPOptimizer"):
        raw_step(model, optimizer.inner)
    assert torch.equal(model.weight, before)
    optimizer.zero_grad()
    optimizer.backward(next(batches))
    optimizer.step()


def writes(how: str, model: nn.Module) -> None:
    with torch.no_grad():
        if how == "in place":
            model.weight.add_(1.0)
        elif how == "copied":
            model.weight.copy_(torch.ones(3, 6))
        elif how == "uncounted":
            model.weight.data.add_(1.0)
        elif how == "a frozen one":
            model.prototypes.data.add_(1.0)
        elif how == "a buffer":
            model.center.add_(1.0)
        else:
            model.load_state_dict({name: t.clone() for name, t in model.state_dict().items()})


class Centred(nn.Linear):
    """Has a frozen parameter and a buffer that a loop might compute from samples."""

    def __init__(self) -> None:
        super().__init__(6, 3)
        self.prototypes = nn.Parameter(torch.zeros(3), requires_grad=False)
        self.center = nn.Buffer(torch.zeros(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) + self.prototypes + self.center


HOWS = ["in place", "copied", "loaded", "uncounted", "a frozen one", "a buffer"]


@pytest.mark.parametrize("how", HOWS)
@pytest.mark.parametrize("when", ["before backward", "before step", "before get_epsilon"])
def test_writing_between_steps_is_noticed(how: str, when: str) -> None:
    engine = PrivacyEngine()
    model, optimizer, loader = private(engine, model=Centred())
    batches = forever(loader)

    def step(write: bool) -> None:
        optimizer.zero_grad()
        if write and when == "before get_epsilon":
            writes(how, model)
            engine.get_epsilon(1e-5)
            return
        if write and when == "before backward":
            writes(how, model)
        optimizer.backward(next(batches))
        if write and when == "before step":
            writes(how, model)
        optimizer.step()

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        writes(how, model)  # before the first step: a checkpoint
        step(False)
        step(False)
        engine.get_epsilon(1e-5)
    with pytest.warns(UserWarning, match="parameters or buffers have changed since the last"):
        step(True)


@pytest.mark.parametrize("how", ["a frozen one", "a buffer", "p.data"])
def test_all_is_looked_at_with_epsilon(how: str) -> None:
    engine = PrivacyEngine()
    model, optimizer, loader = private(engine, model=Centred())
    with mock.patch.object(witness, "RATE", 10**9):
        for _, batch in zip(range(6), forever(loader), strict=False):
            optimizer.backward(batch)
            optimizer.step()
    writes(how, model)
    with pytest.warns(UserWarning, match="parameters or buffers have changed since the last"):
        engine.get_epsilon(1e-5)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("part", ["all", "the other half"])
def test_another_training_of_a_model_is_no_write_of_others(mode: str, part: str) -> None:
    engine, model = PrivacyEngine(), nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 3))
    model[0].requires_grad_(part == "all")
    kept = []
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warnings.filterwarnings("ignore", message="Full backward hook is firing")
        for _ in range(2):
            trained = [p for p in model.parameters() if p.requires_grad]
            own = DPSGD(trained, lr=0.5)
            kept.append(private(engine, model=model, optimizer=own, grad_sample_mode=mode))
            for batch in kept[-1][2]:
                kept[-1][1].backward(batch)
                kept[-1][1].step()
            engine.get_epsilon(1e-3)
            if part != "all":
                for layer in model:
                    layer.requires_grad_(not layer.weight.requires_grad)


@pytest.mark.parametrize("mode", MODES)
def test_sparse_buffers_are_watched(mode: str) -> None:
    model, engine = nn.Sequential(nn.Linear(6, 3)), PrivacyEngine()
    model.graph = nn.Buffer(torch.eye(6).to_sparse())
    _, optimizer, loader = private(engine, model=model, grad_sample_mode=mode)
    for batch in loader:
        optimizer.backward(batch)
        optimizer.step()
    model.graph = model.graph * 2
    with pytest.warns(UserWarning, match="parameters or buffers have changed since the last"):
        engine.get_epsilon(1e-5)


@pytest.mark.parametrize("when", ["before a round", "before get_epsilon"])
def test_writing_between_rounds_of_clients_is_noticed(when: str) -> None:
    engine, model = PrivacyEngine(), nn.Linear(6, 3)
    participation = engine.private_participation(
        clients=3, sample_rate=0.5, noise_multiplier=1.0, max_norm=1.0
    )
    exchange = Exchange(Identity(), transport=Simulated(1)[0])
    rounds = FedAvg(model.named_parameters(), exchange, lr=0.1, participation=participation)
    register(model, rounds)

    def play() -> None:
        for _ in rounds.clients():
            loss_function(model, dataset()[:4]).sum().backward()
            rounds.step()
            rounds.zero_grad()
        model.eval()
        model.train()

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warnings.filterwarnings("ignore", message=".*world size is 1")
        for _ in range(3):
            play()
            engine.get_epsilon(1e-3)
    writes("in place", model)
    with pytest.warns(UserWarning, match="parameters or buffers have changed since the last"):
        play() if when == "before a round" else engine.get_epsilon(1e-3)


def test_a_model_is_watched_after_its_optimizer_is_gone() -> None:
    engine = PrivacyEngine()
    model, optimizer, loader = private(engine)
    optimizer.backward(next(iter(loader)))
    optimizer.step()
    optimizer.zero_grad()
    alive = weakref.ref(optimizer)
    del optimizer, loader
    gc.collect()
    assert alive() is None
    raw_step(model, torch.optim.SGD(model.parameters(), lr=0.1))
    with pytest.warns(UserWarning, match="parameters or buffers have changed since the last"):
        engine.get_epsilon(1e-5)


def test_a_witness_does_not_keep_a_model() -> None:
    engine = PrivacyEngine()
    model, optimizer, loader = private(engine)
    optimizer.backward(next(iter(loader)))
    optimizer.step()
    alive = [weakref.ref(model.weight), weakref.ref(model)]
    del model, optimizer, loader
    gc.collect()
    assert [each() for each in alive] == [None, None]
    engine.get_epsilon(1e-5)


@pytest.mark.parametrize("way", ["in place", "another tensor"])
def test_gradients_that_change_after_their_release_are_noticed(way: str) -> None:
    model, optimizer, loader = private()

    def sharpen(*_: Any) -> None:
        with torch.enable_grad():
            loss = loss_function(model, dataset()[:4]).sum()
        (raw,) = torch.autograd.grad(loss, [model.weight])
        if way == "in place":
            model.weight.grad.add_(raw)
        else:
            model.weight.grad = model.weight.grad + raw

    optimizer.backward(next(iter(loader)))
    handle = optimizer.inner.register_step_pre_hook(sharpen)
    with pytest.warns(UserWarning, match=r"p\.grad has changed after its release"):
        optimizer.step()
    handle.remove()


@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.AdamW, torch.optim.NAdam, DPSGD])
@pytest.mark.parametrize("maximize", [False, True])
def test_optimizers_leave_the_gradients(kind: Any, maximize: bool) -> None:
    model = nn.Linear(6, 3)
    settings: Any = {} if kind is DPSGD else {"maximize": maximize, "weight_decay": 0.1}
    optimizer = kind(model.parameters(), lr=0.1, **settings)
    _, optimizer, loader = private(model=model, optimizer=optimizer)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for batch in loader:
            optimizer.backward(batch)
            optimizer.step()


Tamper = Callable[[ClippedSum], ClippedSum]
TAMPERED: dict[str, Tamper] = {
    "larger": lambda s: ClippedSum([t * 1.1 for t in s.tensors], s.samples, 0, s.bound),
    "more samples": lambda s: ClippedSum([t + 1 for t in s.tensors], s.samples, 0, s.bound),
    "without a bound": lambda s: ClippedSum([t + 100 for t in s.tensors], s.samples),
    "not a number": lambda s: ClippedSum([t * torch.nan for t in s.tensors], s.samples, 0, s.bound),
    "smaller": lambda s: ClippedSum([t * 0.9 for t in s.tensors], s.samples, 0, s.bound),
}


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", TAMPERED)
def test_a_sum_that_clipping_cannot_give_is_not_released(mode: str, name: str) -> None:
    """Of one sample, whose norm is known exactly."""
    one = TensorDataset(torch.randn(1, 6), torch.zeros(1, dtype=torch.long))
    engine = PrivacyEngine()
    model, optimizer, loader = private(
        engine, data_loader=DataLoader(one), sample_rate=1.0, grad_sample_mode=mode
    )
    take = optimizer.gradients.take
    before = model.weight.clone()
    optimizer.backward(next(iter(loader)))
    optimizer.gradients.take = lambda: TAMPERED[name](take())
    with pytest.raises(PrivacyError, match=r"1 clipped gradients .* something else has changed"):
        optimizer.step()
    assert torch.equal(model.weight, before)
    with pytest.raises(ValueError, match="nothing was released"):
        engine.get_epsilon(1e-5)


class Padded(nn.Module):
    def __init__(self, *, tied: bool = False, bag: bool = False) -> None:
        super().__init__()
        self.words = nn.Embedding(9, 4, padding_idx=2)
        self.bag = nn.EmbeddingBag(9, 4, padding_idx=0, mode="sum") if bag else None
        self.head = nn.Linear(4, 9, bias=False)
        if tied:
            self.head.weight = self.words.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        words = (x.abs() * 4).long().clamp(max=8)
        return self.head(self.words(words).sum(1) + (self.bag(words) if self.bag else 0))


@pytest.mark.parametrize("mode", MODES)
def test_noise_does_not_move_padding(mode: str) -> None:
    model, optimizer, loader = private(
        model=Padded(bag=mode == "functorch"), grad_sample_mode=mode, noise_multiplier=1.0
    )
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    for _, batch in zip(range(3), forever(loader), strict=False):
        optimizer.zero_grad()
        optimizer.backward(batch)
        optimizer.step()
    moved = {name: p.detach() - before[name] for name, p in model.named_parameters()}
    assert not moved["words.weight"][2].any()
    assert moved["words.weight"][[0, 1, 3]].all()
    if mode == "functorch":
        assert not moved["bag.weight"][0].any()
        assert moved["bag.weight"][1:].all()


def test_a_row_that_another_layer_trains_is_no_padding() -> None:
    model, optimizer, loader = private(model=Padded(tied=True), noise_multiplier=1.0)
    before = model.words.weight.detach().clone()
    optimizer.backward(next(iter(loader)))
    optimizer.step()
    assert (model.words.weight.detach() - before)[2].all()


class Noisy(nn.Module):
    """Draws in training mode, in a module with layers of its own, as attention of others does."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(6, 8), nn.Linear(8, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = nn.functional.dropout(self.first(x), 1e-3, self.training)
        return self.second(hidden)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("seed", range(2))
def test_dropout_in_a_function_is_no_dependence(mode: str, seed: int) -> None:
    torch.manual_seed(seed)
    _, optimizer, loader = private(model=Noisy(), grad_sample_mode=mode)
    for _, batch in zip(range(3), forever(loader), strict=False):
        optimizer.backward(batch)
        optimizer.step()


def test_equal_samples_are_told_once() -> None:
    inputs = torch.randn(40, 6)
    inputs[30] = inputs[3]
    equal = TensorDataset(inputs, torch.zeros(40, dtype=torch.long))
    _, optimizer, loader = private(data_loader=DataLoader(equal), sample_rate=1.0)
    batches = forever(loader)
    with pytest.warns(UserWarning, match="two samples of a batch are equal"):
        optimizer.backward(next(batches))
    optimizer.step()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        optimizer.backward(next(batches))
