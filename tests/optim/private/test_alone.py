"""A sample gets the gradient that it has alone, in every batch and at every moment."""

import random
from collections import deque
from contextlib import nullcontext
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from comm_hooks.optim.private.errors import PrivacyError
from comm_hooks.optim.private.gradients import alone
from comm_hooks.optim.private.gradients.opacus import OpacusGradients
from comm_hooks.optim.private.gradients.per_sample import PerSampleGradients

C = 1e-3
KINDS = [OpacusGradients, PerSampleGradients]
WRONG = "alone, and of .* in its batch"
Batch = tuple[torch.Tensor, torch.Tensor]


def draw(rows: int, seed: int = 0) -> Batch:
    generator = torch.Generator().manual_seed(seed)
    return (
        torch.randn(rows, 8, generator=generator),
        torch.randint(8, (rows,), generator=generator),
    )


def entropies(model: nn.Module, batch: Any) -> torch.Tensor:
    return F.cross_entropy(model(batch[0]), batch[1], reduction="none")


def size(gradients: Any) -> float:
    return float(torch.cat([t.flatten() for t in gradients.take().tensors]).norm())


class UsesWeightTwice(nn.Module):
    """Calls a layer, and multiplies by its weight once more, which no hook sees."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return self.layer(inputs) + 30 * F.linear(inputs, self.layer.weight)


@pytest.mark.parametrize("micro_batch_size", [None, 1])
def test_a_batch_of_one_sample_is_clipped(micro_batch_size: int | None) -> None:
    gradients = OpacusGradients(UsesWeightTwice(), entropies, C, micro_batch_size=micro_batch_size)
    for seed in range(3):
        gradients.backward(draw(1 if micro_batch_size is None else 3, seed))
    assert size(gradients) <= 9 * C


@pytest.mark.parametrize("rows", [2, 9])
def test_a_use_that_hooks_do_not_see_is_refused(rows: int) -> None:
    with pytest.raises(PrivacyError, match=WRONG):
        OpacusGradients(UsesWeightTwice(), entropies, C).backward(draw(rows))


class Mixes(torch.autograd.Function):
    """A product with a rule for vmap that takes its factor from all samples."""

    @staticmethod
    def forward(x: torch.Tensor) -> torch.Tensor:
        return x * x

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.save_for_backward(inputs[0])

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        (x,) = ctx.saved_tensors
        return 2 * x * gradient

    @staticmethod
    def vmap(info: Any, in_dims: Any, x: torch.Tensor) -> tuple[torch.Tensor, int]:
        return Mixes.apply(x) * (1 + x.detach().mean()), 0


def test_a_rule_for_vmap_that_mixes_is_refused() -> None:
    def loss(model: nn.Module, batch: Any) -> torch.Tensor:
        return Mixes.apply(model(batch[0])).sum(1)

    with pytest.raises(PrivacyError, match="depends on other samples"):
        PerSampleGradients(nn.Linear(8, 8), loss, C).backward(draw(9))


class Later:
    """A loss of single samples that compares them after a number of batches."""

    def __init__(self, calls: int) -> None:
        self.batches, self.from_ = 0, calls

    def __call__(self, model: nn.Module, batch: Any) -> torch.Tensor:
        losses = entropies(model, batch)
        return losses if self.batches < self.from_ else losses * losses.detach().mean()


class Queue(nn.Module):
    """A layer that compares with what it has seen, once it has seen enough."""

    def __init__(self, length: int) -> None:
        super().__init__()
        self.layer, self.length = nn.Linear(8, 8), length
        self.seen: deque[torch.Tensor] = deque(maxlen=64)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        hidden = self.layer(inputs)
        self.seen.extend(inputs.detach())
        if len(self.seen) < self.length:
            return hidden
        return hidden * (1 + torch.stack(list(self.seen)).mean(0))


@pytest.mark.parametrize("kind", [OpacusGradients])
@pytest.mark.parametrize("way", ["loss", "memory"])
def test_what_begins_later_is_found_at_a_random_batch(kind: Any, way: str) -> None:
    loss: Any = Later(9) if way == "loss" else entropies
    model = nn.Linear(8, 8) if way == "loss" else Queue(64)
    gradients = kind(model, loss, C)
    with mock.patch.object(alone, "RATE", 3), pytest.raises(PrivacyError):  # noqa: PT012
        for seed in range(300):
            gradients.backward(draw(6, seed))
            if way == "loss":
                loss.batches += 1
    if way == "loss":
        assert 9 <= loss.batches < 60


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dropout", [0.0, 0.5])
def test_nobody_is_accused(kind: Any, dropout: float) -> None:
    torch.manual_seed(0)
    layers = [nn.Linear(8, 32), nn.ReLU(), nn.Dropout(dropout), nn.Linear(32, 8)]
    gradients = kind(nn.Sequential(*layers), entropies, C)
    with mock.patch.object(alone, "RATE", 1):
        for seed in range(40):
            gradients.backward(draw(1 + seed % 9, seed))
    assert gradients.take().samples > 100


def check_of(model: nn.Module, losses: Any) -> alone.AloneCheck:
    """Return the check of a loss of single samples, as vmap would differentiate it."""
    parameters = [*model.parameters()]

    def differentiate(batch: Any, size: int) -> Any:
        found = losses(batch, size)
        rows = [torch.autograd.grad(loss, parameters, retain_graph=True) for loss in found]
        return found.detach(), [torch.stack(each) for each in zip(*rows, strict=True)]

    return alone.AloneCheck(model, losses, differentiate, parameters, lambda: C)


def test_a_loss_that_draws_by_itself_is_compared_beside_others() -> None:
    others = [0.0]

    def loss(batch: torch.Tensor, size: int) -> torch.Tensor:
        drawn = (model(batch) * torch.rand(size, 8)).sum(1)
        return drawn + others[0] * drawn.detach().mean()

    model = nn.Linear(8, 8)
    check = check_of(model, loss)
    for seed in range(300):
        check.differentiate(draw(5 + seed % 9, seed)[0], 5 + seed % 9, None)
    others[0] = 0.1
    with mock.patch.object(alone, "RATE", 3), pytest.raises(PrivacyError, match="other samples"):
        deque(check.differentiate(draw(9, seed)[0], 9, None) for seed in range(60))


def test_what_is_not_finite_does_not_decide_the_mode() -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.5))
    check = check_of(model, lambda batch, _: model(batch).sum(1))
    check.differentiate(torch.full((4, 8), torch.nan), 4, None)
    assert check.modules == []
    check.differentiate(draw(4)[0], 4, None)
    assert check.modules == [model[1]]


@pytest.mark.parametrize("seed", range(5))
def test_samples_that_stand_out_are_looked_at_first(seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    batch = torch.randn(200, 9, generator=generator)
    batch[:, 6:] = 0
    longest, shortest, one, other = torch.randperm(199, generator=generator)[:4] + 1
    batch[longest] = torch.randn(9, generator=generator)
    batch[shortest, 1:] = 0
    batch[one] = batch[other]
    model = nn.Linear(9, 8)
    sizes: list[int] = []
    looked_at: list[torch.Tensor] = []

    def loss(batch: Any, size: int) -> torch.Tensor:
        sizes.append(size)
        looked_at.extend([batch] if size == 1 else [])
        return model(batch).sum(1)

    with pytest.warns(UserWarning, match="two samples of a batch are equal"):
        check_of(model, loss).differentiate(batch, 200, None)
    for row in (0, longest, shortest, one, other):
        assert any(torch.equal(batch[row], each[0]) for each in looked_at)
    assert sizes.count(1) <= 10


@pytest.mark.parametrize("kind", KINDS)
def test_rows_that_a_collate_function_sorts_train(kind: Any) -> None:
    inputs, labels = draw(20)
    order = inputs[:, 0].argsort()
    gradients = kind(nn.Linear(8, 8), entropies, C)
    gradients.backward(
        (inputs[order], labels[order]), lambda row: (inputs[row, None], labels[row, None])
    )
    assert gradients.take().samples == 20


@pytest.mark.parametrize(("rows", "is_found"), [(60, False), (3000, True)])
def test_less_may_leak_into_each_of_many_samples(rows: int, is_found: bool) -> None:
    inputs, labels = draw(rows)
    gradients = PerSampleGradients(nn.Linear(8, 8), entropies, C)
    with pytest.raises(PrivacyError, match=WRONG) if is_found else nullcontext():
        gradients.backward(
            (inputs * (1 + 3e-4), labels), lambda row: (inputs[row, None], labels[row, None])
        )


def padded(rows: int, scale: float = 1.0) -> tuple[Batch, Any]:
    """Return a batch of sentences that is padded to the longest one, and its reader."""
    generator = torch.Generator().manual_seed(0)
    lengths = torch.randint(2, 9, (rows,), generator=generator)
    inputs = torch.randn(rows, 8, generator=generator)
    inputs[torch.arange(8) >= lengths[:, None]] = 0
    labels = torch.randint(8, (rows,), generator=generator)
    inputs[0, :8] = scale
    return (inputs, labels), lambda row: (inputs[row : row + 1, : lengths[row]], labels[row, None])


class MeanOfPadded(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(1, 8)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return self.layer(inputs.unsqueeze(-1)).mean(1)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("outlier", [1.0, 1e6])
def test_an_outlier_hides_nothing(kind: Any, outlier: float) -> None:
    batch, read = padded(20, outlier)

    def loss(model: nn.Module, batch: Any) -> torch.Tensor:
        return 1e4 + (model(batch[0]).sum(1) - batch[0].sum(1)).square()

    with pytest.raises(PrivacyError, match=WRONG):
        kind(MeanOfPadded(), loss, C).backward(batch, read)


@pytest.mark.parametrize("kind", KINDS)
def test_a_loss_that_is_not_finite_hides_nothing(kind: Any) -> None:
    batch, read = padded(20)

    def loss(model: nn.Module, batch: Any) -> torch.Tensor:
        return entropies(model, batch) + torch.inf

    with pytest.raises(PrivacyError, match=WRONG):
        kind(MeanOfPadded(), loss, C).backward(batch, read)


class EveryRow(random.Random):
    """Draws all rows of a batch where two would be compared."""

    def sample(self, population: Any, k: int, **_: Any) -> Any:
        rows = list(population)
        return rows if isinstance(population, range) else super().sample(rows, k)


@pytest.mark.parametrize("kind", KINDS)
def test_rounding_is_no_dependence(kind: Any) -> None:
    """Of differences between large numbers, in batches of several sizes."""
    generator = torch.Generator().manual_seed(0)
    torch.manual_seed(0)
    model = nn.Linear(8, 1)

    def loss(model: nn.Module, batch: Any) -> torch.Tensor:
        return (model(batch[0])[:, 0] - batch[1]).square()

    gradients = kind(model, loss, 1.0)
    with mock.patch.object(alone, "RATE", 1), mock.patch.object(alone, "_random", EveryRow(0)):
        for rows in (9, 100, 500):
            inputs = 3e3 * torch.randn(rows, 8, generator=generator)
            with torch.no_grad():
                targets = model(inputs)[:, 0] + torch.randn(rows, generator=generator) / 30
            gradients.backward(
                (inputs, targets),
                lambda row, b=(inputs, targets): (b[0][row, None], b[1][row, None]),
            )
    assert gradients.take().samples == 609


class Guarded(nn.Module):
    """Compares with a batch that it has seen, of more than one sample, once there is one."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.seen = nn.Linear(8, 8), None

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        hidden = self.layer(inputs)
        scale = 1.0 if self.seen is None or len(inputs) == 1 else self.seen
        if len(inputs) > 1 and self.active:
            self.seen = 1 + inputs.detach().mean().square()
        return hidden * scale

    active = False


def test_a_memory_of_batches_alone_is_found_beside_others() -> None:
    model = Guarded()
    gradients = OpacusGradients(model, entropies, C)
    gradients.backward(draw(9))
    model.active = True
    with mock.patch.object(alone, "RATE", 2), pytest.raises(PrivacyError):
        deque(gradients.backward(draw(9, seed)) for seed in range(200))
