"""The study of private optimizers: networks, public images, and what each method is told."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from benchmarks.lab.training import new_model
from benchmarks.studies.private_optimizers import methods
from benchmarks.studies.private_optimizers.data import Given, PartlyPublic, build
from benchmarks.studies.private_optimizers.methods import (
    ABLATIONS,
    METHODS,
    PLAIN,
    PRIVATE,
    make_methods,
)
from benchmarks.studies.private_optimizers.models import small_cnn
from benchmarks.studies.private_training import PrivatePlan
from comm_hooks.optim.private import PerSampleGradients, check_model
from tests.benchmarks.lab.published import write_fashion_mnist
from tests.benchmarks.studying import nothing

PLAN = PrivatePlan(20, 64, 0.05, 0.01, 1.0, 1e-4, 1, micro_batch_size=64)


def test_the_network_has_gradients_of_single_samples() -> None:
    torch.manual_seed(0)
    model = small_cnn()
    check_model(model)
    inputs, labels = torch.randn(3, 1, 8, 8), torch.tensor([1, 2, 3])

    def loss(model: torch.nn.Module, batch: Any) -> torch.Tensor:
        return F.cross_entropy(model(batch[0]), batch[1])

    gradients = PerSampleGradients(model, loss, max_grad_norm=1e6)
    gradients.backward((inputs, labels))
    summed = gradients.take().tensors
    (3 * loss(model, (inputs, labels))).backward()
    for parameter, tensor in zip(model.parameters(), summed, strict=True):
        assert parameter.grad is not None
        torch.testing.assert_close(tensor, parameter.grad, atol=1e-4, rtol=1e-3)


def digits(seed: int) -> PartlyPublic:
    return build("digits", seed, None, public=0.01, validation=0.1)


def test_public_images_from_elsewhere_are_turned() -> None:
    upright, turned = (
        build("digits", 0, None, public=0.01, validation=0.1, turned=turned).public
        for turned in (False, True)
    )
    (images, labels), *_ = upright.in_order(len(upright))
    (other, same), *_ = turned.in_order(len(turned))
    assert torch.equal(other, images.rot90(dims=(2, 3)))
    assert torch.equal(same, labels)
    with pytest.raises(ValueError, match="--public-turned: verses has no images"):
        build("verses", 0, None, public=0.01, validation=0.1, turned=True)


def test_public_samples_and_those_for_validation_are_nobody_elses() -> None:
    first, second = digits(0), digits(1)
    assert first.task.validation
    parts = [first.task.clients[0], first.public, first.task.validation]
    assert [len(part) for part in parts] == [1437 - 14 - 142, 14, 142]
    assert len(set(torch.cat([part.indices for part in parts]).tolist())) == 1437
    assert set(second.public.indices.tolist()) != set(first.public.indices.tolist())


@pytest.mark.slow
def test_every_method_learns_where_there_is_hardly_any_noise() -> None:
    compared = make_methods([*PRIVATE, *PLAIN], [digits(0)], [PLAN])
    assert [m.name for m in compared] == [*PLAIN, *PRIVATE]
    starts = {"scale-then-privatize": 0.016, "AdaDPS": 0.1, "AdaDPS, Adam": 0.1}
    starts |= {"AdaDPS, ideal": 0.1, "warm start, DP-SGD": 1.0, "DP-Adam-Pub": 0.016}
    for method in compared:
        if METHODS[method.name].words:
            continue
        settings = {"lr": starts.get(method.name, method.start), **method.variants[-1]}
        curve = method.train(settings, 0, nothing)
        # Half of PDA-DPMD's gradients are those of 14 images.
        assert curve[-1].error < (0.75 if method.name == "PDA-DPMD" else 0.5), method.name


@pytest.mark.slow
def test_methods_of_words_learn_from_verses() -> None:
    data = build("verses", 0, None, public=0.01, validation=0.1)
    names = [name for name, compared in METHODS.items() if compared.words]
    plan = PrivatePlan(60, 64, 0.0025, 0.01, 1.0, 1e-6, 1)
    for method in make_methods(names, [data], [plan]):
        settings = {"lr": 0.4, **method.variants[-1]}
        curve = method.train(settings, 0, nothing)
        assert curve[-1].error < 0.7, method.name  # 0.77 is what the largest part alone gives


@pytest.mark.parametrize("name", ABLATIONS)
def test_ablations_are_what_their_names_say(name: str) -> None:
    data = digits(0)
    given = Given(new_model(data.task, 0, "cpu"), data, PLAN, 0)
    compared = METHODS[name]
    (variant,) = compared.variants
    optimizer: Any = compared.make(given, {"lr": 0.01, **variant})
    group = optimizer.param_groups[0]
    phi = PLAN.noise_variance
    if "eps" in name:
        assert group["eps"] == pytest.approx(float(name.split()[2]) * phi**0.5)
    elif "beta1" in name:
        beta1, beta2 = group["betas"]
        assert f"beta1 {beta1:g}" in name
        assert (1 - beta1) ** 2 == pytest.approx(1 - beta2)
    elif "s =" in name:
        assert name.endswith(f"= {optimizer.sgd_steps}")
        assert optimizer.preconditioned_steps == optimizer.sgd_steps
    elif "v +" in name:
        p = next(given.model.parameters())
        before = p.detach().clone()
        p.grad = torch.full_like(p, 0.01)
        optimizer.step()
        shift = float(name.split()[3]) * phi
        step = 0.01 * 0.01 / (0.01**2 + shift) ** 0.5
        torch.testing.assert_close(before - p, torch.full_like(p, step), rtol=1e-3, atol=0)
    elif name.startswith("DP-MicroAdam"):
        assert group["bias_correction"] in ("published" if "published" in name else "window")
        changed = {"density": 0.1, "window": 10, "residual_bits": 4}
        if "published" not in name:
            option, value = name.removeprefix("DP-MicroAdam, ").removesuffix(" bits").split()
            changed[option.replace("residual", "residual_bits")] = float(value)
        assert {option: group[option] for option in changed} == changed
    elif "as DP-SGD" in name:
        assert group["lr"] == pytest.approx(0.01 * 0.1 / phi**0.5)
    else:
        for p in given.model.parameters():
            p.grad = torch.zeros_like(p).normal_()
        optimizer.noise_variance = 0.25
        optimizer.step()
        subtracted = next(iter(optimizer.state.values()))["noise_avg"] / (1 - 0.999)
        assert f"{subtracted / 0.25:.2g} Phi" in name
        assert optimizer.noise_variance == 0.25


def test_floors_and_clipping_norms_are_in_units_of_the_plan(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    plan = replace(PLAN, noise_multiplier=2.0, max_grad_norm=0.5)
    assert plan.noise_variance == (2.0 * 0.5 / 64) ** 2
    data = digits(0)
    given = Given(new_model(data.task, 0, "cpu"), data, plan, 0)
    compared = METHODS["DP-AdamBC"]
    gammas = [
        compared.make(given, {"lr": 1.0, **v}).param_groups[0]["gamma"] for v in compared.variants
    ]
    assert gammas == [0.243 * plan.noise_variance, 0.02 * plan.noise_variance]

    norms = {}

    def remember(task: Any, model: Any, optimizer: Any, plan: PrivatePlan, *_: Any, **__: Any):
        norms[type(optimizer).__name__] = plan.max_grad_norm
        return []

    monkeypatch.setattr(methods, "train_privately", remember)
    names = [name for name, compared in PRIVATE.items() if not compared.words]
    for method in make_methods(names, [data], [plan]):
        method.train({"lr": 1.0, **method.variants[0]}, 0, nothing)
    assert norms == {
        "DPSGD": 0.5,
        "DPAdam": 0.5,
        "DPAdamBC": 0.5,
        "DPMicroAdam": 0.5,
        "DP2": 0.5,
        "ScaleThenPrivatize": 5.0,
        "AdaDPS": 5.0,
        "DPRMSProp": 0.5,
        "DPRPub": 0.5,
        "DPAdamPub": 0.5,
        "PDADPMD": 0.5,
    }


def test_an_autoencoder_s_public_images_are_not_turned(tmp_path: Path) -> None:
    write_fashion_mnist(tmp_path)
    build("autoencoder", 0, tmp_path, public=0.1, validation=0.1)
    with pytest.raises(ValueError, match="--public-turned: autoencoder would have to turn"):
        build("autoencoder", 0, tmp_path, public=0.1, validation=0.1, turned=True)
