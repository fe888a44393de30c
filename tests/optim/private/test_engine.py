"""Private training end to end, and what it costs."""

import copy
import gc
import itertools
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset

from comm_hooks import (
    CompressionState,
    CountSketch,
    ErrorFeedback,
    Exchange,
    RandomK,
    Sign,
    TopK,
    compression_hook,
    register,
    skip_hook,
)
from comm_hooks.collectives import Simulated, Transport, run_ranks
from comm_hooks.compressors.base import Compressor
from comm_hooks.compressors.identity import Identity
from comm_hooks.optim.private import (
    DPSGD,
    AdaDPS,
    DPAdam,
    DPAdamBC,
    DPMicroAdam,
    DPOptimizer,
    PrivacyEngine,
    PrivacyError,
    ScaleThenPrivatize,
)
from comm_hooks.optim.private.accounting import GaussianEvent, RDPAccountant, max_steps
from tests.optim.scenarios import RanksOf, rarely

SAMPLES = 240


def dataset() -> TensorDataset:
    generator = torch.Generator().manual_seed(0)
    inputs = torch.randn(SAMPLES, 40, generator=generator)
    labels = (inputs @ torch.randn(40, 5, generator=generator)).argmax(1)
    return TensorDataset(inputs, labels)


def small_model() -> nn.Module:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(40, 48), nn.Tanh(), nn.Linear(48, 5))


def loss_function(model: nn.Module, batch: Any) -> torch.Tensor:
    inputs, labels = batch
    return nn.functional.cross_entropy(model(inputs), labels)


def loss_on_everything(model: nn.Module) -> float:
    with torch.no_grad():
        return float(loss_function(model, dataset().tensors))


def private(
    engine: PrivacyEngine,
    model: nn.Module,
    make: Callable[..., torch.optim.Optimizer] = DPSGD,
    **settings: Any,
) -> tuple[nn.Module, DPOptimizer, DataLoader[Any]]:
    defaults: dict[str, Any] = {
        "data_loader": DataLoader(dataset(), batch_size=7, shuffle=True),
        "loss_function": loss_function,
        "noise_multiplier": 1.0,
        "max_grad_norm": 1.0,
        "sample_rate": 0.25,
        "expected_batch_size": 60,
    }
    optimizer = settings.pop("optimizer", None) or make(model.named_parameters(), lr=0.5)
    return engine.make_private(module=model, optimizer=optimizer, **{**defaults, **settings})


def first(samples: int) -> dict[str, Any]:
    """Return the settings in which every step takes these."""
    data = TensorDataset(*dataset()[:samples])
    return {"data_loader": DataLoader(data), "sample_rate": 1.0}


def take_steps(optimizer: DPOptimizer, loader: DataLoader[Any], steps: int) -> None:
    for batch in itertools.islice(itertools.chain.from_iterable(itertools.repeat(loader)), steps):
        optimizer.backward(batch)
        optimizer.step()


def train(
    model: nn.Module, optimizer: DPOptimizer, loader: DataLoader[Any], epochs: int = 1
) -> None:
    for _ in range(epochs):
        for batch in loader:
            optimizer.zero_grad()
            optimizer.backward(batch)
            optimizer.step()


def test_a_private_optimizer_takes_schedulers_and_state_hooks() -> None:
    _, optimizer, loader = private(PrivacyEngine(), small_model(), DPAdam)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=4, gamma=0.5)
    for batch in loader:
        optimizer.backward(batch)
        optimizer.step()
        scheduler.step()
    assert optimizer.inner.param_groups[0]["lr"] == 0.25
    with pytest.raises(TypeError, match="DPOptimizer cannot be copied or pickled"):
        copy.deepcopy(optimizer)
    # The state that may be published is the inner optimizer's alone.
    optimizer.register_state_dict_post_hook(lambda _, state: {**state, "loss": 1.0})
    assert "loss" in optimizer.state_dict()
    assert optimizer.release_state_dict().keys() == optimizer.inner.state_dict().keys()


def train_on_rank(
    transport: Transport, place: str, compressor: Compressor, memory: bool
) -> tuple[list[torch.Tensor], float, float, float, int]:
    torch.manual_seed(42)  # the same on all ranks, as users do
    engine = PrivacyEngine()
    model = small_model()
    exchange = Exchange(
        compressor, ErrorFeedback() if memory else None, min_numel=64, transport=transport
    )
    model, optimizer, loader = private(
        engine, model, placement=place, exchange=exchange, noise_multiplier=0.5
    )
    before = loss_on_everything(model)
    train(model, optimizer, loader, epochs=6)
    drawn = sum(len(labels) for _, labels in loader)
    parameters = [p.detach().clone() for p in model.parameters()]
    epsilon = engine.get_epsilon(delta=1e-3)
    return parameters, before, loss_on_everything(model), epsilon, drawn


@pytest.mark.parametrize(
    ("place", "compressor", "memory"),
    [
        ("central", TopK(density=1 / 8), True),
        ("shares", RandomK(density=0.25, unbiased=False), True),
        ("local", Sign(), True),
        ("aggregate", CountSketch(ratio=0.5), False),
    ],
)
def test_what_is_valid_trains_on_three_ranks_and_costs_what_is_said(
    place: str, compressor: Compressor, memory: bool
) -> None:
    results = run_ranks(lambda transport: train_on_rank(transport, place, compressor, memory), 3)
    for parameters, before, after, epsilon, drawn in results:
        assert after < 0.8 * before
        assert epsilon == RDPAccountant().epsilon([GaussianEvent(0.5, 0.25, steps=24)], 1e-3)
        # A shard of 80 samples, each drawn in 1 of 4 of 4 batches: 80 on average, 7.7 from it.
        assert 80 - 6 * 7.75 < drawn < 80 + 6 * 7.75
        for mine, first in zip(parameters, results[0][0], strict=True):
            assert torch.equal(mine, first)


@pytest.mark.parametrize(
    "make", [DPMicroAdam, *rarely(DPSGD, DPAdam, DPAdamBC, ScaleThenPrivatize)]
)
def test_every_optimizer_learns(make: Callable[..., torch.optim.Optimizer]) -> None:
    lr = 0.5 if make is DPSGD else 0.02
    model = small_model()
    before = loss_on_everything(model)
    optimizer = make(model.named_parameters(), lr=lr)
    train(*private(PrivacyEngine(), model, optimizer=optimizer, noise_multiplier=0.3), epochs=10)
    assert loss_on_everything(model) < 0.8 * before


def test_a_step_is_the_clipped_sum_by_the_public_divisor() -> None:
    model, reference = small_model(), small_model()
    _, optimizer, loader = private(
        PrivacyEngine(),
        model,
        **first(10),
        noise_multiplier=1e-9,
        max_grad_norm=0.3,
        expected_batch_size=11,
        micro_batch_size=4,
    )
    batch = inputs, labels = next(iter(loader))
    optimizer.backward(batch)
    optimizer.step()
    total = [torch.zeros_like(p) for p in reference.parameters()]
    for x, y in zip(inputs, labels, strict=True):
        gradient = torch.autograd.grad(
            loss_function(reference, (x[None], y[None])), list(reference.parameters())
        )
        norm = torch.cat([g.flatten() for g in gradient]).norm()
        for t, g in zip(total, gradient, strict=True):
            t += g * min(1.0, 0.3 / float(norm))
    for p, r, t in zip(model.parameters(), reference.parameters(), total, strict=True):
        torch.testing.assert_close(p, r - 0.5 * t / 11)


def test_the_order_of_parameters_in_the_optimizer_does_not_matter() -> None:
    """A transform is asked for in the optimizer's order and applied in the model's."""
    results = []
    for reverse in (False, True):
        model = small_model()
        named = list(model.named_parameters())
        scales = {n: torch.full_like(p, 1.0 + i).detach() for i, (n, p) in enumerate(named)}
        order = named[::-1] if reverse else named
        optimizer = AdaDPS(order, lr=0.5, side_information=scales)
        _, wrapped, loader = private(
            PrivacyEngine(), model, optimizer=optimizer, noise_multiplier=1e-9, **first(10)
        )
        take_steps(wrapped, loader, 1)
        results.append([p.detach().clone() for p in model.parameters()])
    for one, other in zip(*results, strict=True):
        torch.testing.assert_close(one, other)


def test_an_empty_batch_is_a_step_of_noise() -> None:
    engine = PrivacyEngine()
    model = small_model()
    before = [p.detach().clone() for p in model.parameters()]
    _, optimizer, loader = private(engine, model, sample_rate=1e-9)
    batches = iter(loader)
    optimizer.backward(next(batches))
    optimizer.step()
    next(batches)
    optimizer.step()  # not even a backward pass
    assert all(not torch.equal(p, b) for p, b in zip(model.parameters(), before, strict=True))
    (event,) = engine.state_dict()["events"]
    assert event == {
        "noise_multiplier": 1.0,
        "sample_rate": 1e-9,
        "steps": 2,
        "placement": "central",
        "checkpoint_multiplier": 1.0,
        "rank_multiplier": 0.0,
        "run": engine._opened().run,
    }


def test_samples_without_a_finite_gradient_are_left_out_and_counted() -> None:
    model = small_model()
    data = TensorDataset(*(part.clone() for part in dataset()[:10]))
    data.tensors[0][3] = float("nan")
    data.tensors[0][7, 0] = float("inf")
    _, optimizer, loader = private(
        PrivacyEngine(), model, data_loader=DataLoader(data), sample_rate=1.0
    )
    inputs, labels = next(iter(loader))
    with pytest.warns(UserWarning, match="gradients of 2 samples are not finite"):
        optimizer.backward((inputs, labels))
    optimizer.step()
    assert optimizer.not_finite == 2
    assert all(p.isfinite().all() for p in model.parameters())


def under_ddp() -> tuple[list[torch.Tensor], list[str]]:
    """Train a model in DDP, and return the refusals of hooks before and after that."""
    model = DistributedDataParallel(small_model())
    optimizer = DPSGD(model.named_parameters(), lr=0.5)
    train(*private(PrivacyEngine(), model, optimizer=optimizer))
    hooked, unhooked = (DistributedDataParallel(small_model()) for _ in range(2))
    hooked.register_comm_hook(
        CompressionState(TopK(density=0.1), ErrorFeedback()), compression_hook
    )
    unhooked.register_comm_hook(None, skip_hook)
    private(PrivacyEngine(), unhooked, optimizer=DPSGD(unhooked.named_parameters(), lr=0.5))
    attempts: list[Callable[[], Any]] = [
        lambda: private(PrivacyEngine(), hooked, DPSGD),
        lambda: model.register_comm_hook(None, skip_hook),
        lambda: register(model, "topk"),
    ]
    messages = []
    for attempt in attempts:
        with pytest.raises(PrivacyError) as error:
            attempt()
        messages.append(str(error.value))
    return [p.detach().clone() for p in model.parameters()], messages


def test_a_model_in_ddp_sends_nothing_by_itself_nor_by_a_hook(ranks_of: RanksOf) -> None:
    results = ranks_of(2).run(under_ddp)
    for mine, first in zip(results[1][0], results[0][0], strict=True):
        assert torch.equal(mine, first)
    for _, (before, *after) in results:
        assert "compression_hook would see the raw gradient" in before
        assert all("would never be called" in message for message in after)


def test_epsilon_before_the_first_step_and_for_ranks() -> None:
    engine = PrivacyEngine()
    with pytest.raises(ValueError, match="no step has been taken"):
        engine.get_epsilon(delta=1e-3)
    model = small_model()
    world = Simulated(1)
    exchange = Exchange(TopK(density=0.1), ErrorFeedback(), transport=world[0])
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="world size is 1")
        train(*private(engine, model, placement="local", exchange=exchange))
    assert engine.get_epsilon(1e-3, observer="rank") == engine.get_epsilon(1e-3)
    train(*private(engine, model, placement="central"))
    with pytest.raises(PrivacyError, match="carry no noise of their own"):
        engine.get_epsilon(1e-3, observer="rank")
    with pytest.raises(ValueError, match="observer must be one of model, checkpoint, rank"):
        engine.get_epsilon(1e-3, observer="nobody")


@pytest.mark.parametrize("delta", [0.5, 0.1, 1 / SAMPLES])
def test_a_delta_that_publishing_a_sample_would_satisfy_is_refused(delta: float) -> None:
    engine = PrivacyEngine()
    train(*private(engine, small_model()))
    message = "is not below one over the number of samples"
    with pytest.raises(ValueError, match=message):
        engine.get_epsilon(delta)
    with pytest.raises(ValueError, match=message):
        engine.set_budget(1.0, delta)
    early = PrivacyEngine()
    early.set_budget(1.0, delta)
    with pytest.raises(ValueError, match=message):
        private(early, small_model())


def test_every_process_on_a_ledger_answers_alike(tmp_path: Path) -> None:
    """Also one that has trained nothing, and one that goes on with another placement."""
    path = tmp_path / "privacy.jsonl"
    engine = PrivacyEngine(ledger=path)
    train(*private(engine, small_model(), placement="central"))
    engine._opened().close()

    reader = PrivacyEngine(ledger=path)
    with pytest.raises(
        PrivacyError, match=r"messages of single ranks carry no noise.*placement 'central'"
    ):
        reader.get_epsilon(1e-3, observer="rank")
    assert reader.get_epsilon(1e-3, observer="checkpoint") == reader.get_epsilon(1e-3)
    train(*private(reader, small_model(), placement="local"))
    with pytest.raises(
        PrivacyError, match=r"messages of single ranks carry no noise.*placement 'central'"
    ):
        reader.get_epsilon(1e-3, observer="rank")

    elsewhere = PrivacyEngine()
    with pytest.warns(UserWarning, match="lacks 8 steps"):
        elsewhere.load_state_dict(reader.state_dict())
    with pytest.raises(PrivacyError, match="placement 'central'"):
        elsewhere.get_epsilon(1e-3, observer="rank")


def test_a_history_that_does_not_say_where_noise_was_protects_from_nobody_else() -> None:
    engine = PrivacyEngine()
    engine._opened().record(GaussianEvent(1.0, 0.25))
    assert engine.get_epsilon(1e-3) > 0
    for observer, what in (("rank", "messages"), ("checkpoint", "saved states")):
        with pytest.raises(PrivacyError, match=f"{what} of single ranks .* that is not known"):
            engine.get_epsilon(1e-3, observer=observer)


def epsilons_of_shares(transport: Transport) -> list[float]:
    """Two trainings under shares; the second one has residuals."""
    found = []
    for memory in (None, ErrorFeedback()):
        engine = PrivacyEngine()
        exchange = Exchange(RandomK(density=0.25, unbiased=False), memory, transport=transport)
        train(*private(engine, small_model(), placement="shares", exchange=exchange))
        found += [engine.get_epsilon(1e-3, observer=o) for o in ("model", "checkpoint", "rank")]
    return found


def test_a_share_of_the_noise_protects_less_from_ranks_and_in_residuals() -> None:
    accountant = RDPAccountant()
    whole, half = (accountant.epsilon([GaussianEvent(s, 0.25, 4)], 1e-3) for s in (1.0, 0.5))
    for found in run_ranks(epsilons_of_shares, 4):
        assert found == [whole, whole, half, whole, half, half]


def with_epsilon(
    engine: PrivacyEngine, epsilon: float, steps: int
) -> tuple[nn.Module, DPOptimizer, DataLoader[Any]]:
    model = small_model()
    return engine.make_private_with_epsilon(
        target_epsilon=epsilon,
        target_delta=1e-3,
        steps=steps,
        sample_rate=0.25,
        module=model,
        optimizer=DPSGD(model.named_parameters(), lr=0.5),
        data_loader=DataLoader(dataset()),
        loss_function=loss_function,
        max_grad_norm=1.0,
        expected_batch_size=60,
    )


def test_a_budget_lasts_exactly_as_long_as_it_may() -> None:
    engine = PrivacyEngine()
    model, optimizer, loader = with_epsilon(engine, 2.0, 10)
    sigma = optimizer.mechanism.noise_multiplier
    left = max_steps(2.0, 1e-3, noise_multiplier=sigma, sample_rate=0.25)
    assert left >= 10
    take_steps(optimizer, loader, left)
    assert 1.9 < engine.get_epsilon(1e-3) <= 2.0
    before = [p.detach().clone() for p in model.parameters()]
    with pytest.raises(PrivacyError, match=r"budget of epsilon 2 at delta 0\.001 is spent"):
        take_steps(optimizer, loader, 1)
    assert engine.get_epsilon(1e-3) <= 2.0
    assert all(torch.equal(p, b) for p, b in zip(model.parameters(), before, strict=True))
    # The noise for another budget makes up for the spent one.
    _, optimizer, loader = with_epsilon(engine, 2.5, 20)
    take_steps(optimizer, loader, 20)
    assert 2.4 < engine.get_epsilon(1e-3) <= 2.5


def continued(path: str, ranks: tuple[int, ...]) -> float | str | None:
    group = dist.new_group([*ranks])
    if dist.get_rank() not in ranks:
        return None
    engine = PrivacyEngine(ledger=path)
    exchange = Exchange(Identity(), process_group=group)
    try:
        train(*private(engine, small_model(), exchange=exchange))
    except ValueError as error:
        return str(error)
    return engine.get_epsilon(1e-3)


@pytest.mark.parametrize("ranks", [(0, 1, 2), (1, 2)], ids=str)
def test_the_first_of_those_that_train_together_has_the_ledger_and_all_count_alike(
    ranks: tuple[int, ...], ranks_of: RanksOf, tmp_path: Path
) -> None:
    path = tmp_path / "ledger.jsonl"
    for run in (1, 2):
        expected = RDPAccountant().epsilon([GaussianEvent(1.0, 0.25, steps=4 * run)], 1e-3)
        found = ranks_of(3).run(continued, str(path), ranks)
        assert found == [expected if rank in ranks else None for rank in range(3)]
    path.write_text("my notes\n")
    for rank, message in enumerate(ranks_of(3).run(continued, str(path), ranks)):
        assert rank not in ranks or "the file exists and is not a ledger" in message


def test_the_lock_of_a_ledger_goes_with_its_last_user(tmp_path: Path) -> None:
    """Without waiting for the garbage collector."""
    path = tmp_path / "ledger.jsonl"
    gc.disable()
    try:
        for _ in range(2):
            engine = PrivacyEngine(ledger=path)
            optimizer, loader = private(engine, small_model())[1:]
            take_steps(optimizer, loader, 1)
            participation = engine.private_participation(
                clients=10, sample_rate=0.5, noise_multiplier=1.0, max_norm=1.0
            )
            del engine, optimizer, loader, participation
    finally:
        gc.enable()


def test_a_second_training_of_one_engine_adds_to_the_first() -> None:
    engine = PrivacyEngine()
    train(*private(engine, small_model()))
    engine.load_state_dict(engine.state_dict())
    for other in ({}, [], None, {"events": [{"sigma": 1.0}]}):
        with pytest.raises(ValueError, match="must be a mapping with 'events'"):
            engine.load_state_dict(other)  # type: ignore[arg-type]
    train(*private(engine, small_model()))
    assert engine.state_dict()["events"][0]["steps"] == 8


def test_a_release_is_in_the_ledger_before_it_is_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "ledger.jsonl"
    _, optimizer, loader = private(PrivacyEngine(ledger=path), small_model())
    seen = []

    def release(sums: Any) -> Any:
        seen.append(path.read_text().splitlines()[1:])
        raise RuntimeError("the link is down")

    monkeypatch.setattr(optimizer.mechanism, "release", release)
    with pytest.raises(RuntimeError, match="link"):
        take_steps(optimizer, loader, 1)
    assert len(seen[0]) == 2, "a mechanism and a step"


def test_no_secret_is_in_anything_that_is_saved() -> None:
    engine = PrivacyEngine()
    model = small_model()
    model, optimizer, loader = private(engine, model, DPAdamBC)
    train(model, optimizer, loader)
    optimizer.load_state_dict(optimizer.state_dict())
    torch.save([engine.state_dict(), optimizer.state_dict(), model.state_dict()], "/dev/null")
    with pytest.raises(TypeError, match="a GaussianMechanism cannot be saved"):
        torch.save(optimizer.mechanism, "/dev/null")


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"noise_multiplier": 0.0}, r"noise_multiplier must lie in \(0, inf\)"),
        ({"max_grad_norm": 0.0}, "max_grad_norm must lie in"),
        ({"sample_rate": 1.5}, r"sample_rate must lie in \[0, 1\]"),
        ({"placement": "rank_0"}, "place must be one of"),
        ({"grad_sample_mode": "magic"}, "grad_sample_mode must be one of"),
        ({"loss_function": None}, "loss_function must be callable, got None"),
        ({"data_loader": [1, 2]}, "data_loader must be a DataLoader, got \\[1, 2\\]"),
    ],
)
def test_settings_out_of_range(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        private(PrivacyEngine(), small_model(), **settings)


def test_models_and_optimizers_that_do_not_fit() -> None:
    with_norm = nn.Sequential(nn.Linear(40, 8), nn.BatchNorm1d(8), nn.Linear(8, 5))
    with pytest.raises(PrivacyError, match="batch normalization"):
        private(PrivacyEngine(), with_norm)
    model = small_model()
    some = DPSGD(list(model.parameters())[:2], lr=0.1)
    with pytest.raises(ValueError, match="lacks 2 that it does"):
        private(PrivacyEngine(), model, optimizer=some)
    world = Simulated(1)
    exchange = Exchange(TopK(density=0.1), ErrorFeedback(), transport=world[0])
    with pytest.raises(PrivacyError, match=r"rule 17"):
        private(PrivacyEngine(), model, DPAdamBC, exchange=exchange, placement="local")
    _, optimizer, _ = private(PrivacyEngine(), model)
    with pytest.raises(ValueError, match="cannot be added"):
        optimizer.add_param_group({"params": []})
    with pytest.raises(ValueError, match="closure"):
        optimizer.step(lambda: 0.0)  # type: ignore[arg-type]
    engine = PrivacyEngine()
    with pytest.raises(ValueError, match="LBFGS computes gradients several times in a step"):
        private(engine, model, optimizer=torch.optim.LBFGS(model.parameters()))
    assert not engine._history()
    with pytest.raises(ValueError, match="unknown accountant 'gdp'"):
        PrivacyEngine(accountant="gdp")
