"""The parts of a private step, as the library makes them: what an audit plays."""

from collections.abc import Mapping
from typing import Protocol

import torch
from torch import nn

from benchmarks.audit.configuration import Configuration
from comm_hooks.collectives.base import Transport
from comm_hooks.collectives.requests import Round
from comm_hooks.exchange import Exchange
from comm_hooks.optim.private.data.poisson import PoissonSampler
from comm_hooks.optim.private.gradients.clipping import ClippedGradients, LossFunction
from comm_hooks.optim.private.gradients.per_sample import PerSampleGradients
from comm_hooks.optim.private.noise.mechanism import GaussianMechanism, Released


class Mechanism(Protocol):
    """What makes clipped sums private, on one rank."""

    def round(self, sums: Mapping[str, torch.Tensor]) -> Round[Released]: ...


class Stages:
    """Makes each part of a private step; override what is yours to have it audited.

    Every call stands for the start of a process: what a process draws anew must be drawn anew.

    Args:
        configuration: what they are made for.
    """

    def __init__(self, configuration: Configuration) -> None:
        self.configuration = configuration

    def gradients(self, model: nn.Module, loss_function: LossFunction) -> ClippedGradients:
        """Return what clips and sums up per-sample gradients."""
        return PerSampleGradients(model, loss_function, self.configuration.max_grad_norm)

    def sampler(self, rank: int, num_samples: int, steps: int) -> PoissonSampler:
        """Return what draws the batches of one rank's shard."""
        return PoissonSampler(num_samples, self.configuration.sample_rate, steps, rank=rank)

    def exchange(self, transport: Transport) -> Exchange:
        """Return one rank's exchange."""
        return self.configuration.build_exchange(transport)

    def mechanism(self, exchange: Exchange, noise_multiplier: float) -> Mechanism:
        """Return what adds noise and exchanges, on the exchange's rank."""
        configuration = self.configuration
        return GaussianMechanism(
            exchange,
            place=configuration.placement,  # type: ignore[arg-type]
            noise_multiplier=noise_multiplier,
            max_grad_norm=configuration.max_grad_norm,
            expected_batch_size=configuration.expected_batch_size,
        )
