"""The settings and the table of planted faults, and stages with one part of another class."""

import re
from collections.abc import Callable, Mapping
from typing import Any

from torch import nn

from benchmarks.audit import Configuration, Stages
from benchmarks.audit.configuration import Mechanism
from comm_hooks.exchange import Exchange
from comm_hooks.optim.private.data.poisson import PoissonSampler
from comm_hooks.optim.private.gradients.clipping import ClippedGradients, LossFunction
from comm_hooks.optim.private.gradients.per_sample import PerSampleGradients
from comm_hooks.optim.private.noise.mechanism import GaussianMechanism

Fault = tuple[dict[str, Any], type[Stages]]

MASK = {"compressor": "random_k", "density": 0.125, "unbiased": False}
TOPK = {"compressor": "topk", "density": 0.0625}


def configuration(**changes: Any) -> Configuration:
    settings: dict[str, Any] = {
        "noise_multiplier": 2.0,
        "max_grad_norm": 0.5,
        "sample_rate": 0.05,
        "expected_batch_size": 10.0,
        "steps": 60,
        "delta": 1e-5,
        "world_size": 2,
    }
    return Configuration(**{**settings, **changes})


class Faults(dict[str, Fault]):
    """The faults of one part, by name: the settings and the stages.

    Args:
        part: ``"clipping"``, ``"noise"``, ``"memory"`` or ``"sampling"``.
        make: makes stages of a function; a class of a part or of stages needs none.
        defaults: settings of all faults.
    """

    def __init__(
        self, part: str, make: Callable[[Any], type[Stages]] | None = None, **defaults: Any
    ) -> None:
        super().__init__()
        self._part, self._make, self._defaults = part, make, defaults

    def plant(self, **settings: Any) -> Callable[[Any], Any]:
        """Return a decorator that enters a function or a class under its name."""

        def enter(subject: Any) -> Any:
            self._add(re.sub(r"(?<!^)(?=[A-Z])", "_", subject.__name__).lower(), subject, settings)
            return subject

        return enter

    def plant_all(self, functions: Mapping[str, Any], **settings: Any) -> None:
        """Enter functions by name."""
        for name, function in functions.items():
            self._add(name, function, settings)

    def _add(self, name: str, subject: Any, settings: dict[str, Any]) -> None:
        if isinstance(subject, type):
            stages = subject if issubclass(subject, Stages) else stages_with(subject)
        else:
            assert self._make is not None
            stages = self._make(subject)
        self[f"{self._part}: {name}"] = ({**self._defaults, **settings}, stages)


def stages_of(fault: Fault) -> Stages:
    """Return the subject of an audit."""
    settings, stages = fault
    return stages(configuration(**settings))


def stages_with(part: type[Any]) -> type[Stages]:
    """Return stages with a clipper, a sampler or a mechanism of this class."""

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
