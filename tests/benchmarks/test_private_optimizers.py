"""The study of private optimizers: networks, public images, and what each method is told."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from benchmarks.studies.private_optimizers import methods
from benchmarks.studies.private_optimizers.methods import (
    METHODS,
    NOT_PRIVATE,
    Given,
    build_images,
    make_methods,
)
from benchmarks.studies.private_optimizers.models import (
    StandardizedConv2d,
    small_cnn,
    wide_resnet,
)
from benchmarks.studies.private_training import PrivatePlan
from comm_hooks.launchers.lab.simulated import new_model
from comm_hooks.optim.private import PerSampleGradients, check_model
from tests.benchmarks.studying import nothing
from tests.launchers.lab.published import write_cifar10

PLAN = PrivatePlan(20, 64, 0.05, 0.01, 1.0, 1e-4, 1, micro_batch_size=64)


def test_wrn_16_4_has_the_published_size() -> None:
    model = wide_resnet()
    # Three groups of two blocks: 12 convolutions of 3x3, the first one and 3 shortcuts.
    convolutions = [m for m in model.modules() if isinstance(m, torch.nn.Conv2d)]
    assert len(convolutions) == 16
    assert all(isinstance(m, StandardizedConv2d) for m in convolutions)
    assert sum(p.numel() for p in model.parameters()) == 2_748_890
    with torch.no_grad():
        assert model(torch.randn(1, 3, 32, 32)).shape == (1, 10)
        # Two groups halve the resolution.
        assert model[:7](torch.randn(1, 3, 32, 32)).shape == (1, 256, 8, 8)


def test_filters_are_standardized() -> None:
    conv = StandardizedConv2d(8, 5, 3)
    with torch.no_grad():
        conv.weight.mul_(3).add_(2)
    filters = conv.standardized().flatten(1)
    torch.testing.assert_close(filters.mean(1), torch.zeros(5), atol=1e-6, rtol=0)
    torch.testing.assert_close(filters.norm(dim=1), torch.ones(5), atol=1e-4, rtol=0)
    # The variance of white noise stays what it is.
    x = torch.randn(4, 8, 16, 16)
    inside = conv(x)[:, :, 1:-1, 1:-1]
    assert float(inside.detach().var()) == pytest.approx(1, rel=0.1)
    torch.testing.assert_close(conv(x), F.conv2d(x, conv.standardized(), padding=1))


@pytest.mark.parametrize(
    ("build", "shape"),
    [(small_cnn, (1, 8, 8)), (lambda: wide_resnet(depth=10, factor=1), (3, 32, 32))],
)
def test_networks_have_gradients_of_single_samples(
    build: Callable[[], torch.nn.Module], shape: tuple[int, ...]
) -> None:
    torch.manual_seed(0)
    model = build()
    check_model(model)
    inputs, labels = torch.randn(3, *shape), torch.tensor([1, 2, 3])

    def loss(model: torch.nn.Module, batch: Any) -> torch.Tensor:
        return F.cross_entropy(model(batch[0]), batch[1])

    gradients = PerSampleGradients(model, loss, max_grad_norm=1e6)
    gradients.backward((inputs, labels))
    summed = gradients.take().tensors
    (3 * loss(model, (inputs, labels))).backward()
    for parameter, tensor in zip(model.parameters(), summed, strict=True):
        assert parameter.grad is not None
        torch.testing.assert_close(tensor, parameter.grad, atol=1e-4, rtol=1e-3)


def test_public_images_are_nobody_elses() -> None:
    first, second = (build_images("digits", seed, None) for seed in (0, 1))
    private, public = set(first.task.clients[0].indices.tolist()), first.public.indices.tolist()
    assert len(private) == 1437 - 14
    assert len(public) == 14
    assert private.isdisjoint(public)
    assert set(second.public.indices.tolist()) != set(public)


def test_every_method_learns_where_there_is_hardly_any_noise() -> None:
    images = [build_images("digits", 0, None)]
    compared = make_methods(METHODS, images, [PLAN])
    assert [m.name for m in compared] == [NOT_PRIVATE, *METHODS]
    for method in compared:
        start = {"scale-then-privatize": 0.016, "AdaDPS": 0.1}.get(method.name, method.start)
        settings = {"lr": start, **method.variants[-1]}
        curve = method.train(settings, 0, nothing)
        assert curve[-1].error < 0.5, method.name


def test_floors_and_clipping_norms_are_in_units_of_the_plan(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    plan = replace(PLAN, noise_multiplier=2.0, max_grad_norm=0.5)
    assert plan.noise_variance == (2.0 * 0.5 / 64) ** 2
    images = build_images("digits", 0, None)
    given = Given(new_model(images.task, 0, "cpu"), images, plan, 0)
    make, _, variants = methods._METHODS["DP-AdamBC"]
    gammas = [make(given, {"lr": 1.0, **v}).param_groups[0]["gamma"] for v in variants]
    assert gammas == [0.243 * plan.noise_variance, 0.02 * plan.noise_variance]

    norms = {}

    def remember(task: Any, model: Any, optimizer: Any, plan: PrivatePlan, *_: Any, **__: Any):
        norms[type(optimizer).__name__] = plan.max_grad_norm
        return []

    monkeypatch.setattr(methods, "train_privately", remember)
    for method in make_methods(METHODS, [images], [plan])[1:]:
        method.train({"lr": 1.0, **method.variants[0]}, 0, nothing)
    assert norms == {
        "DPSGD": 0.5,
        "DPAdam": 0.5,
        "DPAdamBC": 0.5,
        "DPMicroAdam": 0.5,
        "DP2": 0.5,
        "ScaleThenPrivatize": 5.0,
        "AdaDPS": 5.0,
    }


def test_cifar_10_is_learned_from_its_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_cifar10(tmp_path)
    images = build_images("cifar10", 0, tmp_path)
    assert images.task.make_model is wide_resnet
    assert (len(images.task.clients[0]), len(images.public)) == (99, 1)
    small = replace(images.task, make_model=lambda: wide_resnet(depth=10, factor=1))
    plan = replace(PLAN, steps=12, batch=32, sample_rate=0.3, max_grad_norm=4.0)
    (_, method) = make_methods(["DP-Adam"], [replace(images, task=small)], [plan])
    curve = method.train({"lr": 0.01}, 0, nothing)
    untrained = small.evaluate(new_model(small, 0, "cpu"))
    assert curve[-1].loss < 0.9 * untrained["loss"]
