"""One drawn batch, one release: whatever else a loop does raises."""

import copy
import functools
import itertools
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from comm_hooks.optim.private import DPSGD, PerSampleGradients, PrivacyEngine, PrivacyError

# Of the first layer's hooks, where the inputs need no gradient.
pytestmark = pytest.mark.filterwarnings("ignore:Full backward hook is firing")
SAMPLES = 40


def dataset() -> TensorDataset:
    generator = torch.Generator().manual_seed(0)
    inputs = torch.randn(SAMPLES, 6, generator=generator)
    return TensorDataset(inputs, torch.randint(3, (SAMPLES,), generator=generator))


def loss_function(model: nn.Module, batch: Any) -> torch.Tensor:
    inputs, labels = batch
    return nn.functional.cross_entropy(model(inputs), labels, reduction="none")


def private(engine: PrivacyEngine | None = None, **settings: Any) -> Any:
    """Return a model, a private optimizer and a loader with these settings, others by default."""
    torch.manual_seed(1)
    model = settings.pop("model", None) or nn.Linear(6, 3)
    optimizer = settings.pop("optimizer", None) or DPSGD(model.named_parameters(), lr=0.5)
    defaults: dict[str, Any] = {
        "data_loader": DataLoader(dataset()),
        "loss_function": loss_function,
        "noise_multiplier": 1e-9,
        "max_grad_norm": 0.1,
        "sample_rate": 0.5,
        "expected_batch_size": 20,
    }
    return (engine or PrivacyEngine()).make_private(
        module=model, optimizer=optimizer, **{**defaults, **settings}
    )


def forever(loader: DataLoader[Any]) -> Iterator[Any]:
    return itertools.chain.from_iterable(itertools.repeat(loader))


def copied(batch: Any) -> Any:
    """What moving a batch to another device makes of it."""
    return [tensor.clone() for tensor in batch]


def parameters(model: nn.Module) -> torch.Tensor:
    return torch.cat([p.detach().flatten() for p in model.parameters()])


def steps_of(engine: PrivacyEngine) -> int:
    return sum(event["steps"] for event in engine.state_dict()["events"])


@pytest.mark.parametrize("to", [list, copied])
@pytest.mark.parametrize("of_the_next", [True, False])
def test_a_second_backward_before_the_step_raises(
    to: Callable[[Any], Any], of_the_next: bool
) -> None:
    """Two losses on one batch, or two batches, would let a sample contribute 2 C."""
    model, optimizer, loader = private()
    batches = forever(loader)
    first = next(batches)
    optimizer.backward(to(first))
    again = next(batches) if of_the_next else first
    with pytest.raises(PrivacyError, match=r"this step has a batch already.*call step\(\)"):
        optimizer.backward(to(again))
    before = parameters(model)
    optimizer.step()
    # What was refused is not in it, and what was drawn meanwhile still has its turn.
    assert 0 < float((parameters(model) - before).norm()) <= 0.5 * 0.1 * len(first[0]) / 20 + 1e-6
    optimizer.backward(to(again if of_the_next else next(batches)))
    optimizer.step()


def test_without_a_drawn_batch_there_is_no_step() -> None:
    engine = PrivacyEngine()
    model, optimizer, loader = private(engine)
    before = parameters(model)
    with pytest.raises(PrivacyError, match=r"no drawn batch is left, or .*: take every batch"):
        optimizer.step()
    with pytest.raises(PrivacyError, match="no drawn batch is left"):
        optimizer.backward(dataset()[:10])
    batch = next(iter(loader))
    optimizer.backward(batch)
    optimizer.step()
    with pytest.raises(PrivacyError, match="no drawn batch is left"):
        optimizer.step()
    with pytest.raises(PrivacyError, match="no drawn batch is left"):
        optimizer.backward(copied(batch))
    batch = next(iter(loader))
    with pytest.raises(PrivacyError, match=r"and the batch that was passed has 0 or is another"):
        optimizer.step()
    assert steps_of(engine) == 1
    assert not torch.equal(parameters(model), before)


def test_the_batches_of_another_loader_are_refused() -> None:
    _, optimizer, loader = private()
    _, _, everything = private(sample_rate=1.0)
    others = next(iter(everything))
    with pytest.raises(PrivacyError, match="or comes from another loader"):
        optimizer.backward(others)
    own = next(iter(loader))
    for batch in (others, copied(others), dataset()[: SAMPLES - 1], [t[1:] for t in own]):
        with pytest.raises(PrivacyError, match=r"another loader|next drawn batch"):
            optimizer.backward(batch)
    optimizer.backward(own)


def test_batches_have_their_turn() -> None:
    """Leaving out empty ones would show that nobody was drawn."""
    _, optimizer, loader = private(sample_rate=0.02)
    batches = forever(loader)
    next(batch for batch in batches if not len(batch[0]))
    drawn = next(batch for batch in batches if len(batch[0]))
    with pytest.raises(PrivacyError, match="An empty batch is a step, too"):
        optimizer.backward(drawn)
    with pytest.raises(PrivacyError, match="drawn batches were taken from the loader and not used"):
        next(iter(loader))


def test_a_batch_that_was_seen_must_be_used() -> None:
    model, optimizer, loader = private()
    batches = forever(loader)
    first = next(batches)
    optimizer.zero_grad()  # nothing was passed yet: the batch is still good
    optimizer.backward(first)
    with pytest.raises(PrivacyError, match="epsilon holds only if that does not depend on its con"):
        optimizer.zero_grad()
    before, twin = parameters(model), copy.deepcopy(model)
    optimizer.step()
    optimizer.zero_grad()
    gradients = PerSampleGradients(twin, loss_function, 0.1)
    gradients.backward(first)
    total = torch.cat([tensor.flatten() for tensor in gradients.take().tensors])
    torch.testing.assert_close(parameters(model) - before, -0.5 * total / 20)


def test_a_batch_that_failed_may_be_tried_again() -> None:
    """After running out of memory: no sample may count twice, nor be lost."""

    class Fails(nn.Linear):
        calls_left = 1000

        def forward(self, inputs: torch.Tensor) -> torch.Tensor:
            self.calls_left -= 1
            if not self.calls_left:
                raise MemoryError
            return super().forward(inputs)

    moved = []
    for failing in (False, True):
        torch.manual_seed(1)
        model, optimizer, loader = private(sample_rate=1.0, model=Fails(6, 3), micro_batch_size=8)
        batch = next(iter(loader))
        if failing:
            model.calls_left = 4
            with pytest.raises(MemoryError):
                optimizer.backward(batch)
        optimizer.backward(batch)
        optimizer.step()
        moved.append(parameters(model))
    torch.testing.assert_close(*moved)


def test_what_was_added_by_other_ways_is_noticed() -> None:
    engine = PrivacyEngine()
    _, optimizer, loader = private(engine)
    batches = forever(loader)
    batch = next(batches)
    optimizer.backward(batch)
    optimizer.gradients.backward(batch)
    with pytest.raises(PrivacyError, match="were added without this optimizer's"):
        optimizer.step()
    assert steps_of(engine) == 0
    optimizer.backward(next(batches))
    optimizer.step()


class FetchesAhead:
    """A loader around a loader, as Accelerate's: one batch ahead, moved to a device."""

    def __init__(self, loader: DataLoader[Any]) -> None:
        self._loader = loader

    def __iter__(self) -> Iterator[Any]:
        batches = iter(self._loader)
        current = next(batches)
        for following in batches:
            yield copied(current)
            current = following
        yield copied(current)


@pytest.mark.parametrize("workers", [0, 2])
def test_tickets_survive_workers_and_loaders_that_fetch_ahead(workers: int) -> None:
    engine = PrivacyEngine()
    usual = DataLoader(dataset(), num_workers=workers, persistent_workers=workers > 0)
    _, optimizer, loader = private(engine, sample_rate=0.25, data_loader=usual)
    for _ in range(3):
        for batch in FetchesAhead(loader):
            optimizer.backward(batch)
            optimizer.step()
            optimizer.zero_grad()
    assert steps_of(engine) == 12


MODES = ["functorch", "hooks"]


@pytest.fixture(params=MODES)
def mode(request: pytest.FixtureRequest) -> str:
    if request.param != "functorch":
        pytest.importorskip("opacus")
    return str(request.param)


@pytest.mark.parametrize("to", [list, copied])
def test_a_batch_is_good_for_one_step(mode: str, to: Callable[[Any], Any]) -> None:
    engine = PrivacyEngine()
    _, optimizer, loader = private(engine, grad_sample_mode=mode)
    batches = forever(loader)
    fixed = to(next(batches))
    optimizer.backward(fixed)
    with pytest.raises(PrivacyError, match="this step has a batch already"):
        optimizer.backward(fixed)
    optimizer.step()
    with pytest.raises(PrivacyError, match="was used or discarded before"):
        optimizer.backward(fixed)
    with pytest.raises(PrivacyError, match="no drawn batch is left"):
        optimizer.step()
    new = next(batches)
    with pytest.raises(PrivacyError, match="was used or discarded before"):
        optimizer.backward(fixed)
    optimizer.backward(to(new))
    optimizer.step()
    assert steps_of(engine) == 2


def test_an_empty_batch_is_a_batch(mode: str) -> None:
    engine = PrivacyEngine()
    _, optimizer, loader = private(engine, sample_rate=1e-6, grad_sample_mode=mode)
    batches = forever(loader)
    assert optimizer.backward(next(batches)).isnan()
    with pytest.raises(PrivacyError, match="this step has a batch already"):
        optimizer.backward(next(batches))
    optimizer.step()
    optimizer.step()
    with pytest.raises(PrivacyError, match="no drawn batch is left"):
        optimizer.step()
    assert steps_of(engine) == 2


@pytest.mark.parametrize("discarded_by", ["optimizer", "model", "nobody"])
def test_gradients_of_an_ordinary_backward_pass_are_refused(mode: str, discarded_by: str) -> None:
    engine = PrivacyEngine()
    model, optimizer, loader = private(engine, grad_sample_mode=mode)
    batches = forever(loader)
    for number in range(4):
        batch = next(batches)
        loss_function(model, batch).sum().backward()
        if discarded_by == "nobody":
            call = optimizer.step if number % 2 else functools.partial(optimizer.backward, batch)
            with pytest.raises(PrivacyError, match=r"call optimizer\.backward\(batch\) instead"):
                call()
            assert all(p.grad is None for p in model.parameters())
        elif discarded_by == "model":
            model.zero_grad(set_to_none=number % 2 == 0)
        else:
            optimizer.zero_grad()
        optimizer.backward(batch)
        if discarded_by == "nobody" and number == 3:
            loss_function(model, batch).sum().backward()
            with pytest.raises(PrivacyError, match=r"loss\.backward\(\) was called"):
                optimizer.step()
        optimizer.step()
    assert steps_of(engine) == 4


def test_a_private_model_can_be_copied_and_saved(mode: str) -> None:
    model, optimizer, loader = private(sample_rate=1.0, grad_sample_mode=mode)
    batch = next(iter(loader))
    optimizer.backward(batch)
    optimizer.step()
    twin = copy.deepcopy(model)
    assert torch.equal(parameters(twin), parameters(model))
    assert list(model.state_dict()) == ["weight", "bias"]
    _, optimizer, loader = private(sample_rate=1.0, grad_sample_mode=mode, model=twin)
    optimizer.backward(next(iter(loader)))
    optimizer.step()
    assert not torch.equal(parameters(twin), parameters(model))
