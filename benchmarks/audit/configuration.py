"""The subject of an audit: a private training as JSON, and the parts of its step."""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import nn

from comm_hooks.collectives.base import Transport
from comm_hooks.collectives.requests import Round
from comm_hooks.collectives.simulated import Simulated
from comm_hooks.config import check_options, unknown
from comm_hooks.exchange import Exchange, ExchangeSettings
from comm_hooks.optim import private
from comm_hooks.optim.private.accounting import (
    ACCOUNTANTS,
    Accountant,
    GaussianEvent,
    build_accountant,
)
from comm_hooks.optim.private.accounting.accountant import require_delta
from comm_hooks.optim.private.data.poisson import PoissonSampler
from comm_hooks.optim.private.gradients.clipping import ClippedGradients, LossFunction
from comm_hooks.optim.private.gradients.per_sample import PerSampleGradients
from comm_hooks.optim.private.noise.mechanism import (
    GaussianMechanism,
    Released,
    require_owners,
)
from comm_hooks.optim.private.noise.placement import (
    Scheme,
    Verdict,
    judge,
    require_known_variance,
)
from comm_hooks.requirements import require_choice, require_within

_STATED = ("feedback", "clipping")


@dataclass(frozen=True)
class Configuration:
    """A private training.

    Attributes:
        noise_multiplier: sigma.
        max_grad_norm: C.
        sample_rate: q.
        steps: the total number of steps.
        delta: of the guarantee.
        expected_batch_size: B.
        world_size: N.
        exchange: as :meth:`comm_hooks.ExchangeSettings.from_dict` takes it.
        optimizer: a class of ``comm_hooks.optim.private``, by name.
        accountant: a key of ``ACCOUNTANTS``.
        unit, placement, feedback, clipping: see :class:`~comm_hooks.optim.private.Scheme`.  By
            default ``feedback`` and ``clipping`` follow from the placement and the exchange, as in
            training.
    """

    noise_multiplier: float
    max_grad_norm: float
    sample_rate: float
    steps: int
    delta: float
    expected_batch_size: float = 1.0
    world_size: int = 1
    exchange: Mapping[str, Any] = field(default_factory=lambda: {"compressor": "identity"})
    unit: str = "sample"
    placement: str = "central"
    feedback: str | None = None
    clipping: str | None = None
    optimizer: str | None = None
    accountant: str = "rdp"

    def __post_init__(self) -> None:
        for name in ("noise_multiplier", "max_grad_norm", "expected_batch_size"):
            require_within(self, name, getattr(self, name), "(0, inf)")
        self.event()  # checks the ranges of the rate and of the steps
        if self.sample_rate == 0:
            raise ValueError("sample_rate must be in (0, 1], got 0")
        require_delta(self.delta)
        require_choice(self, "accountant", self.accountant, [*ACCOUNTANTS])
        self._scheme()
        if self.unit == "sample" and self.placement == "central":
            require_owners(self.build_exchange(Simulated(self.world_size)[0]))
        _optimizer(self.optimizer)

    def build_exchange(self, transport: Transport) -> Exchange:
        """Return one rank's exchange."""
        settings = ExchangeSettings.from_dict(self.exchange, path="exchange")
        return Exchange(settings, transport=transport)

    def build_accountant(self) -> Accountant:
        """Return the accountant."""
        return build_accountant(self.accountant)

    def event(self) -> GaussianEvent:
        """Return the releases of the whole training."""
        return GaussianEvent(self.noise_multiplier, self.sample_rate, self.steps)

    def judge(self) -> Verdict:
        """Return the verdict of the placement rules.

        Raises:
            PrivacyError: if the configuration does not guarantee its claim.
        """
        scheme, optimizer = self._scheme(), _optimizer(self.optimizer)
        if optimizer is not None:
            require_known_variance(optimizer, scheme)
        return judge(scheme)

    def _scheme(self) -> Scheme:
        stated = {name: getattr(self, name) for name in _STATED}
        return Scheme.of(
            self.build_exchange(Simulated(self.world_size)[0]),
            self.placement,  # type: ignore[arg-type]  # Scheme checks it
            self.unit,  # type: ignore[arg-type]
            **{name: value for name, value in stated.items() if value is not None},
        )

    def why_not_played(self) -> str | None:
        """Return the reason why the simulated ranks cannot play the configuration, or None."""
        if self.unit == "client":
            return "rounds of clients are not played, only looked up in the rules"
        return None


class Mechanism(Protocol):
    """Makes the clipped sums of one rank private."""

    def round(self, sums: Mapping[str, torch.Tensor]) -> Round[Released]: ...


class Stages:
    """Makes the parts of a private step.  Override a method to audit a part of your own.

    Each call stands for the start of a process: draw fresh randomness in it.

    Args:
        configuration: the settings of the parts.
    """

    def __init__(self, configuration: Configuration) -> None:
        self.configuration = configuration

    def gradients(self, model: nn.Module, loss_function: LossFunction) -> ClippedGradients:
        """Return the part that clips and adds up per-sample gradients."""
        return PerSampleGradients(model, loss_function, self.configuration.max_grad_norm)

    def sampler(self, rank: int, num_samples: int, steps: int) -> PoissonSampler:
        """Return the sampler of one rank's shard."""
        return PoissonSampler(num_samples, self.configuration.sample_rate, steps, rank=rank)

    def exchange(self, transport: Transport) -> Exchange:
        """Return one rank's exchange."""
        return self.configuration.build_exchange(transport)

    def mechanism(self, exchange: Exchange, noise_multiplier: float) -> Mechanism:
        """Return the part that adds noise and exchanges, on the exchange's rank."""
        configuration = self.configuration
        return GaussianMechanism(
            exchange,
            place=configuration.placement,  # type: ignore[arg-type]
            noise_multiplier=noise_multiplier,
            max_grad_norm=configuration.max_grad_norm,
            expected_batch_size=configuration.expected_batch_size,
        )


def read_configuration(path: Path) -> Configuration:
    """Read a configuration from JSON.

    Raises:
        ValueError: for an unreadable file, an unknown or missing key, and a value out of range.
            The message names the file.
    """
    try:
        content = json.loads(path.read_text())
    except OSError as error:
        raise ValueError(f"{path}: cannot be read ({error.strerror})") from None
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path}: is not JSON: {error}") from None
    if not isinstance(content, dict):
        raise ValueError(f"{path}: must be an object, got {content!r}")
    try:
        check_options("the training", content, [f.name for f in fields(Configuration)])
        for key in ("noise_multiplier", "max_grad_norm", "sample_rate", "steps", "delta"):
            if key not in content:
                raise ValueError(f"{key} is missing")
        return Configuration(**content)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None


def _optimizer(name: str | None) -> type | None:
    if name is None:
        return None
    classes = {n: getattr(private, n) for n in private.__all__}
    known = [n for n, c in classes.items() if hasattr(c, "step") and n != "DPOptimizer"]
    if name not in known:
        raise ValueError(f"optimizer: {unknown('private optimizer', name, known)}")
    found: type = classes[name]
    return found
