"""Samples that depend on each other are refused, others never."""

import itertools
import random
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.nn import functional as F
from torch.utils import _pytree as pytree

from comm_hooks.optim.private.errors import PrivacyError
from comm_hooks.optim.private.gradients import alone
from comm_hooks.optim.private.gradients.alone import AloneCheck
from comm_hooks.optim.private.gradients.per_sample import PerSampleGradients
from comm_hooks.optim.private.random_states import random_states, random_states_kept
from tests.optim.private.dependence import (
    DEPENDENT,
    INDEPENDENT,
    WIDTH,
    Transformer,
    divided,
    draw,
    entropies,
    mlp,
)

DEPENDS = "the loss of a sample depends on other samples|alone, and of .* in its batch"
DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.float16]


class Probe:
    """Looks at batches of a model whose samples are differentiated one loss after the other."""

    def __init__(self, model: nn.Module, loss: Any) -> None:
        self.loss = loss
        self._model = model
        self._parameters = [*model.parameters()]
        self.check = AloneCheck(
            model, self._losses, self._differentiate, self._parameters, lambda: 1e-3
        )

    def _losses(self, batch: Any, size: int) -> torch.Tensor:
        return self.loss(self._model, batch)

    def _differentiate(self, batch: Any, size: int) -> Any:
        losses = self._losses(batch, size)
        found = [
            torch.autograd.grad(each, self._parameters, retain_graph=True, materialize_grads=True)
            for each in losses
        ]
        return losses.detach(), [torch.stack(rows) for rows in zip(*found, strict=True)]

    def look(self, batch: Any) -> None:
        self.check.differentiate(batch, len(pytree.tree_leaves(batch)[0]), None)


@pytest.mark.parametrize(("rows", "dtype"), [(4, torch.float32), (33, torch.bfloat16)], ids=str)
@pytest.mark.parametrize("name", DEPENDENT)
def test_what_depends_on_other_samples_is_refused(name: str, rows: int, dtype: torch.dtype) -> None:
    torch.manual_seed(rows)
    make, loss = DEPENDENT[name]
    model = make().to(dtype)
    with pytest.raises(PrivacyError, match=DEPENDS):
        Probe(model, loss).look(draw(model, rows, dtype, rows))


@pytest.mark.slow
@settings(max_examples=200, deadline=None)
@given(
    name=st.sampled_from(sorted(INDEPENDENT)),
    dtype=st.sampled_from(DTYPES),
    rows=st.integers(2, 64),
    size=st.sampled_from([1e-3, 1.0, 30.0]),
    seed=st.integers(0, 1000),
)
def test_what_does_not_depend_on_them_passes(
    name: str, dtype: torch.dtype, rows: int, size: float, seed: int
) -> None:
    torch.manual_seed(seed)
    make, loss = INDEPENDENT[name]
    model = make().to(dtype)
    Probe(model, loss).look(draw(model, rows, dtype, seed, size))


def test_under_autocast() -> None:
    def under_autocast(loss: Any) -> Any:
        def inside(model: nn.Module, batch: Any) -> torch.Tensor:
            with torch.autocast("cpu", torch.bfloat16):
                return loss(model, batch)

        return inside

    for seed in range(2):
        torch.manual_seed(seed)
        model = mlp()
        batch = draw(model, 9, torch.float32, seed)
        Probe(model, under_autocast(entropies)).look(batch)
        with pytest.raises(PrivacyError, match=DEPENDS):
            Probe(model, under_autocast(divided)).look(batch)


@pytest.mark.parametrize(("one", "other"), [*itertools.permutations(range(8), 2)])
def test_any_two_samples_are_told_apart(one: int, other: int) -> None:
    def loss(model: nn.Module, batch: Any) -> torch.Tensor:
        scores = model(batch[0]).sum(1)
        found = (batch[1] == other).nonzero()[:1, 0]
        factor = 2 + scores[found].sum().tanh()
        return scores.square() * torch.where(batch[1] == one, factor, 1.0)

    model = mlp()
    inputs, _ = draw(model, 8, torch.float32, 0)
    with pytest.raises(PrivacyError, match=DEPENDS):
        Probe(model, loss).look((inputs, torch.arange(8)))


def test_a_whole_batch_is_seen() -> None:
    def loss(model: nn.Module, batch: Any) -> torch.Tensor:
        return entropies(model, batch) * (1 + float(len(batch[0]) > 20))

    model = mlp()
    Probe(model, loss).look(draw(model, 20, torch.float32, 0))
    with pytest.raises(PrivacyError, match=DEPENDS):
        Probe(model, loss).look(draw(model, 21, torch.float32, 0))


def test_a_margin_that_no_sample_comes_near_is_crossed_by_extreme_ones() -> None:
    def loss(model: nn.Module, batch: Any) -> torch.Tensor:
        scores = model(batch[0]).sum(1)
        return scores.square() + (scores.detach().max() - 50).clamp(min=0)

    model = nn.Sequential(nn.Linear(WIDTH, 5))
    batch = draw(model, 6, torch.float32, 0)
    assert float(model(batch[0]).detach().sum(1).max()) < 20
    with pytest.raises(PrivacyError, match=DEPENDS):
        Probe(model, loss).look(batch)


def test_samples_that_are_not_finite_decide_nothing() -> None:
    """One sample alone shows no dependence; of the first batch with two, others are replaced."""
    gradients = PerSampleGradients(mlp(), entropies, 1.0)
    inputs, labels = draw(mlp(), 5, torch.float32, 0)
    spoilt = inputs.clone()
    spoilt[1:] = torch.nan
    with mock.patch.object(alone, "RATE", 1):
        for finite in (1, 2):
            spoilt[:finite] = inputs[:finite]
            with mock.patch.object(alone, "neighbours", wraps=alone.neighbours) as replaced:
                gradients.backward((spoilt, labels))
            assert replaced.called == (finite == 2)


def test_neither_random_numbers_nor_modes_nor_gradients_are_touched() -> None:
    def loss(model: nn.Module, tokens: torch.Tensor) -> torch.Tensor:
        scale = random.random() + np.random.random()
        return scale * F.cross_entropy(model(tokens), tokens[:, 0] % 5, reduction="none")

    model = Transformer()
    model.block.self_attn.eval()
    modes = [module.training for module in model.modules()]
    probe, batch = Probe(model, loss), draw(model, 9, torch.float32, 0)
    with random_states_kept():
        probe._differentiate(batch, 9)
        after_one_pass = random_states()
    probe.look(batch)
    assert random_states() == after_one_pass
    assert modes == [module.training for module in model.modules()]
    assert all(p.grad is None for p in model.parameters())


def test_what_cannot_be_computed_twice_is_not_called_dependent() -> None:
    generator = torch.Generator().manual_seed(0)

    def loss(model: nn.Module, batch: Any) -> torch.Tensor:
        return entropies(model, batch) * torch.rand(len(batch[0]), generator=generator)

    model = mlp()
    with pytest.raises(PrivacyError, match="changes with the samples before it"):
        Probe(model, loss).look(draw(model, 4, torch.float32, 0))


def test_a_loss_that_refuses_extreme_samples_is_looked_at_without() -> None:
    def loss(model: nn.Module, batch: Any) -> torch.Tensor:
        if float(batch[0].abs().max()) > 100:
            raise ValueError("out of range")
        return entropies(model, batch)

    model = mlp()
    Probe(model, loss).look(draw(model, 4, torch.float32, 0))
