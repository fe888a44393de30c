"""Optimizers that transform before clipping, through the engine on two ranks, against loops."""

from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.functional import mse_loss
from torch.utils.data import DataLoader, TensorDataset

from comm_hooks.optim.private import DP2, AdaDPS, PrivacyEngine, ScaleThenPrivatize
from comm_hooks.optim.private.optimizers.public_knowledge import PublicGradients

NORM, STEPS, SAMPLES = 0.8, 5, 20

Batch = tuple[torch.Tensor, torch.Tensor]


def loss_of(model: nn.Module, batch: Batch) -> torch.Tensor:
    return mse_loss(model(batch[0]), batch[1])


def data(seed: int, samples: int) -> Batch:
    generator = torch.Generator().manual_seed(seed)
    sizes = torch.tensor([10.0, 1.0, 1.0, 0.1, 0.1, 0.01])
    inputs = torch.randn(samples, 6, generator=generator) * sizes
    return inputs, torch.randn(samples, 2, generator=generator)


def new_model() -> nn.Module:
    model = nn.Linear(6, 2)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for p in model.parameters():
            p.copy_(0.1 * torch.randn(p.shape, generator=generator))
    return model


def optimizer_of(kind: str, model: nn.Module) -> Any:
    named = list(model.named_parameters())
    if kind == "scale_then_privatize":
        return ScaleThenPrivatize(named, 0.01, scale_eps=0.1)
    if kind == "dp2":
        phases = {"sgd_steps": 2, "preconditioned_steps": 2}
        return DP2(named, 0.05, lr_ratio=0.5, clip_ratio=2.0, eps=0.1, **phases)
    public = PublicGradients(model, loss_of, [data(seed, 4) for seed in (7, 8, 9)])
    return AdaDPS(named, 0.05, public_gradients=public, preconditioner=kind, eps=0.1)


def through_the_engine(kind: str) -> list[list[float]]:
    model = new_model()
    model, optimizer, loader = PrivacyEngine().make_private(
        module=model,
        optimizer=optimizer_of(kind, model),
        data_loader=DataLoader(TensorDataset(*data(1, SAMPLES))),
        loss_function=loss_of,
        noise_multiplier=1e-5,  # to compare; this protects nobody
        max_grad_norm=NORM,
        sample_rate=1.0,
        expected_batch_size=SAMPLES,
    )
    for _ in range(STEPS):
        for batch in loader:
            optimizer.backward(batch)
            optimizer.step()
    return [p.tolist() for p in model.parameters()]


def by_hand(kind: str) -> list[torch.Tensor]:
    model = new_model()
    optimizer = optimizer_of(kind, model)
    parameters = list(model.parameters())
    inputs, targets = data(1, SAMPLES)
    for _ in range(STEPS):
        transform = optimizer.transform()
        sums = [torch.zeros_like(p) for p in parameters]
        for i in range(SAMPLES):
            loss = loss_of(model, (inputs[i : i + 1], targets[i : i + 1]))
            gradients = list(torch.autograd.grad(loss, parameters))
            if transform is not None:
                shifts = transform.shift or [torch.zeros(())] * len(parameters)
                changes = zip(gradients, transform.scale, shifts, strict=True)
                gradients = [scale * g + shift for g, scale, shift in changes]
            norm = torch.cat([g.flatten() for g in gradients]).norm()
            for total, g in zip(sums, gradients, strict=True):
                total += g * min(1.0, NORM / float(norm))
        for p, total in zip(parameters, sums, strict=True):
            p.grad = total / SAMPLES
        optimizer.step()
    return parameters


@pytest.mark.parametrize("kind", ["rmsprop", "adam", "adagrad", "scale_then_privatize", "dp2"])
def test_two_ranks_do_what_loops_do(ranks_of: Any, kind: str) -> None:
    first, second = ranks_of(2).run(through_the_engine, kind)
    assert first == second, "ranks agree bit by bit"
    for found, expected in zip(first, by_hand(kind), strict=True):
        torch.testing.assert_close(torch.tensor(found), expected.detach(), rtol=2e-3, atol=2e-4)
