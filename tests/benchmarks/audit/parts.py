"""Stages of an audit in which one part is made by another class than the library's."""

from typing import Any

from torch import nn

from benchmarks.audit.stages import Mechanism, Stages
from comm_hooks.exchange import Exchange
from comm_hooks.optim.private.data.poisson import PoissonSampler
from comm_hooks.optim.private.gradients.clipping import ClippedGradients, LossFunction
from comm_hooks.optim.private.gradients.per_sample import PerSampleGradients
from comm_hooks.optim.private.noise.mechanism import GaussianMechanism


def stages_with(part: type[Any]) -> type[Stages]:
    """Return stages of which this class makes a part: what clips, draws or adds noise."""

    class Changed(Stages):
        def gradients(self, model: nn.Module, loss_function: LossFunction) -> ClippedGradients:
            kind = part if issubclass(part, PerSampleGradients) else PerSampleGradients
            return kind(model, loss_function, self.configuration.max_grad_norm)

        def sampler(self, rank: int, num_samples: int, steps: int) -> PoissonSampler:
            kind = part if issubclass(part, PoissonSampler) else PoissonSampler
            return kind(num_samples, self.configuration.sample_rate, steps, rank=rank)

        def mechanism(self, exchange: Exchange, noise_multiplier: float) -> Mechanism:
            kind = part if issubclass(part, GaussianMechanism) else GaussianMechanism
            return library_mechanism(self, exchange, noise_multiplier, kind=kind)

    Changed.__name__ = part.__name__
    return Changed


def library_mechanism(
    stages: Stages,
    exchange: Exchange,
    noise_multiplier: float,
    kind: type[GaussianMechanism] = GaussianMechanism,
    **options: Any,
) -> GaussianMechanism:
    configuration = stages.configuration
    return kind(
        exchange,
        place=configuration.placement,  # type: ignore[arg-type]
        noise_multiplier=noise_multiplier,
        max_grad_norm=configuration.max_grad_norm,
        expected_batch_size=configuration.expected_batch_size,
        **options,
    )
