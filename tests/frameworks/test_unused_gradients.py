"""Gradients that a loop throws away: what the page of DDP says of GANs."""

import contextlib
from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from comm_hooks import register
from tests.ranks import Ranks

RanksOf = Callable[[int], Ranks]


def distance(remedy: str) -> float:
    """Return how far what a discriminator got is from its own gradients, relative to these."""
    torch.manual_seed(0)
    generator = DistributedDataParallel(nn.Linear(64, 64))
    discriminator = DistributedDataParallel(nn.Sequential(nn.Linear(64, 64), nn.LeakyReLU(0.2)))
    weight = discriminator.module[0].weight
    for model in (generator, discriminator):
        register(model, "topk", density=1 / 16)
    got, own = torch.zeros(64, 64), torch.zeros(64, 64)
    data = torch.Generator().manual_seed(1)  # the same on all ranks
    for _ in range(100):
        real, noise = torch.randn(2, 32, 64, generator=data)
        both = torch.cat([real, generator.module(noise).detach()])
        signs = torch.ones(64, 1)
        signs[:32] = -1
        discriminator.zero_grad()
        (discriminator(both) * signs).mean().backward()
        got += weight.grad
        (gradient,) = torch.autograd.grad((discriminator.module(both) * signs).mean(), weight)
        own += gradient
        generator.zero_grad()
        discriminator.requires_grad_(remedy != "freeze")
        unsynchronized = remedy == "no_sync"
        with discriminator.no_sync() if unsynchronized else contextlib.nullcontext():
            loss = -discriminator(generator(noise)).mean()
        loss.backward()
        discriminator.requires_grad_(True)
    return float((got - own).norm() / own.norm())


@pytest.mark.parametrize("remedy", ["freeze", pytest.param("no_sync", marks=pytest.mark.slow)])
def test_a_generators_step_leaves_nothing_for_the_discriminator(
    ranks_of: RanksOf, remedy: str
) -> None:
    assert max(ranks_of(2).run(distance, remedy)) < 0.2
    assert min(ranks_of(2).run(distance, "")) > 0.4
