"""Loops that gave one sample more than its bound, or told too small an epsilon, in silence."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset, default_collate

from comm_hooks import Exchange
from comm_hooks.collectives import Simulated
from comm_hooks.compressors.identity import Identity
from comm_hooks.optim import FedAvg
from comm_hooks.optim.private import PrivacyEngine, PrivacyError, RankLevel
from tests.optim.private.test_tickets import dataset, forever, loss_function, private, steps_of

MODES = ["functorch", "hooks"]


@pytest.mark.parametrize("mode", MODES)
def test_a_batch_that_was_refused_is_refused_again(mode: str) -> None:
    def centred(samples: list[Any]) -> Any:
        inputs, labels = default_collate(samples)
        return inputs - inputs.mean(0), labels

    loader = DataLoader(dataset(), collate_fn=centred)
    _, optimizer, batches = private(data_loader=loader, grad_sample_mode=mode)
    batch = next(iter(batches))
    for _ in range(3):
        with pytest.raises(PrivacyError):
            optimizer.backward(batch)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("rate", [0.1, 0.5])
def test_samples_that_are_flipped_by_chance_train(mode: str, rate: float) -> None:
    class Flipped(Dataset[Any]):
        def __len__(self) -> int:
            return 40

        def __getitem__(self, index: int) -> Any:
            inputs = dataset()[index][0]
            return (inputs.flip(0) if torch.rand(()) < rate else inputs), index % 3

    _, optimizer, loader = private(data_loader=DataLoader(Flipped()), grad_sample_mode=mode)
    for _, batch in zip(range(40), forever(loader), strict=False):
        optimizer.backward(batch)
        optimizer.step()


def test_a_batch_that_was_taken_cannot_be_dropped() -> None:
    engine = PrivacyEngine()
    _, optimizer, loader = private(engine)
    batches = iter(loader)
    first = next(batches)
    optimizer.backward(first)
    optimizer.step()
    next(batches)
    for _ in range(2):
        with pytest.raises(PrivacyError, match=r"1 drawn batches were taken .* and not used"):
            next(iter(loader))
    assert steps_of(engine) == 1


def test_what_is_released_is_in_the_ledger() -> None:
    engine = PrivacyEngine()
    _, optimizer, loader = private(engine)
    optimizer.backward(next(iter(loader)))
    optimizer.step()
    sums = {"weight": torch.zeros(3, 6), "bias": torch.zeros(3)}
    with pytest.raises(PrivacyError, match="this release would not be in the ledger"):
        optimizer.mechanism.release(sums)
    assert steps_of(engine) == 1


class Initializes(nn.Module):
    """Starts with the mean of its first inputs."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.is_new = nn.Linear(6, 3), True

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.is_new:
            self.is_new = False
            self.layer.bias.data += x.detach().mean()
        return self.layer(x)


@pytest.mark.parametrize("mode", MODES)
def test_parameters_are_not_computed_from_samples(mode: str) -> None:
    model = Initializes()
    before = model.layer.bias.detach().clone()
    _, optimizer, loader = private(model=model, grad_sample_mode=mode)
    with pytest.raises(PrivacyError, match="the forward pass writes to the model"):
        optimizer.backward(next(iter(loader)))
    assert torch.equal(model.layer.bias, before)


@pytest.mark.parametrize("mode", MODES)
def test_parameters_outside_of_the_model_are_refused(mode: str) -> None:
    head = nn.Linear(3, 3)

    def with_head(model: nn.Module, batch: Any) -> torch.Tensor:
        return loss_function(nn.Sequential(model, head), batch)

    _, optimizer, loader = private(loss_function=with_head, grad_sample_mode=mode)
    with pytest.raises(PrivacyError, match=r"a parameter of shape \(3, 3\) that is not in the mod"):
        optimizer.backward(next(iter(loader)))


def of_first_client(value: float) -> torch.Tensor:
    torch.manual_seed(0)
    model = nn.Linear(4, 2)
    participation = PrivacyEngine().private_participation(
        clients=3, sample_rate=1.0, noise_multiplier=1e-9, max_norm=1.0
    )
    exchange = Exchange(Identity(), transport=Simulated(1)[0])
    rounds = FedAvg(model.named_parameters(), exchange, lr=1e-3, participation=participation)
    for client in rounds.clients():
        inputs = torch.full((8, 4), value if client == 0 else 1.0)
        own = torch.optim.SGD(model.parameters(), lr=0.5)
        for step in (own.step, rounds.step):
            own.zero_grad()
            model(inputs).sum().backward()
            step()
        rounds.zero_grad()
    leaves = torch.utils._pytree.tree_leaves(rounds.release_state_dict())
    return torch.cat([leaf.flatten() for leaf in leaves if isinstance(leaf, torch.Tensor)])


def test_the_first_turn_of_clients_has_its_bound_as_well() -> None:
    moved = float((of_first_client(50.0) - of_first_client(-50.0)).norm())
    assert moved <= 2 / 3 * (1 + 1e-3)


def trained(engine: PrivacyEngine, model: nn.Module) -> None:
    _, optimizer, loader = private(engine, model=model, noise_multiplier=1.0)
    for batch in loader:
        optimizer.backward(batch)
        optimizer.step()


@pytest.mark.parametrize("part", ["all", "head"])
def test_a_model_has_the_releases_of_all_engines(part: str, tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(6, 3), nn.Linear(3, 3))
    first = PrivacyEngine(ledger=tmp_path / "ledger")
    trained(first, model)
    if part == "head":
        model[0].requires_grad_(False)
    for engine in (PrivacyEngine(), PrivacyEngine(ledger=tmp_path / "another")):
        with pytest.raises(PrivacyError, match=r"this model, or .* comes from 2 releases"):
            trained(engine, model)
        with pytest.raises(ValueError, match="nothing was released"):
            engine.get_epsilon(1e-5)
    trained(first, model)
    continued = PrivacyEngine()
    with pytest.warns(UserWarning, match="lacks 4 steps"):
        continued.load_state_dict(first.state_dict())
    trained(continued, model)
    assert steps_of(continued) == 6


def test_ranks_and_samples_of_one_model_have_one_epsilon() -> None:
    model = nn.Linear(6, 3)
    exchange = Exchange(Identity(), transport=Simulated(1)[0])
    RankLevel(noise_multiplier=8.0, max_norm=1.0).attach(exchange, model)
    parameters = {name: torch.zeros_like(p) for name, p in model.named_parameters()}
    exchange.average_(parameters)
    with pytest.raises(PrivacyError, match=r"this model, or .* comes from 1 releases"):
        trained(PrivacyEngine(), model)


def test_clients_and_samples_of_one_model_have_one_epsilon() -> None:
    model, engine = nn.Linear(6, 3), PrivacyEngine()
    participation = engine.private_participation(
        clients=3, sample_rate=1.0, noise_multiplier=1.0, max_norm=1.0
    )
    exchange = Exchange(Identity(), transport=Simulated(1)[0])
    rounds = FedAvg(model.named_parameters(), exchange, lr=1e-3, participation=participation)
    for _ in rounds.clients():
        model(torch.ones(2, 6)).sum().backward()
        rounds.step()
        rounds.zero_grad()
    with pytest.raises(PrivacyError, match=r"this model, or .* comes from 1 releases"):
        trained(PrivacyEngine(), model)


def test_a_ledger_stays_where_it_was_named(tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.chdir(tmp_path)
    engine = PrivacyEngine(ledger="ledger")
    (tmp_path / "folder").mkdir()
    monkeypatch.chdir(tmp_path / "folder")
    trained(engine, nn.Linear(6, 3))
    assert (tmp_path / "ledger").exists()


def test_the_shard_of_a_rank_is_settled() -> None:
    _, _, loader = private()
    with pytest.raises(PrivacyError, match=r"indices is settled"):
        loader.dataset.indices = [0] * len(loader.dataset.indices)


class Normalized(nn.Sequential):
    def __init__(self) -> None:
        norm = nn.BatchNorm1d(6).eval().requires_grad_(False)
        super().__init__(nn.Linear(6, 6), norm, nn.Linear(6, 3))


@pytest.mark.parametrize("mode", MODES)
def test_batch_norm_in_evaluation_mode_trains_until_it_is_in_training(mode: str) -> None:
    model = Normalized()
    _, optimizer, loader = private(model=model, grad_sample_mode=mode)
    for batch in loader:
        optimizer.backward(batch)
        optimizer.step()
    model[1].train()
    with pytest.raises(ValueError, match=r"writes to the model|running_mean|in training mode"):
        optimizer.backward(next(iter(loader)))


def test_hooks_say_that_they_need_training_mode() -> None:
    model = nn.Sequential(nn.Linear(6, 6), nn.Dropout(0.5), nn.Linear(6, 3)).eval()
    _, optimizer, loader = private(model=model, grad_sample_mode="hooks")
    batch = next(iter(loader))
    with pytest.raises(ValueError, match=r"0 is in eval\(\) mode, in which .* hooks do not see"):
        optimizer.backward(batch)
    model.train()[1].eval()
    optimizer.backward(batch)
