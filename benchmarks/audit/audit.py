"""The audit of a configuration: checks of its parts, and an attack on its releases."""

from collections.abc import Sequence
from dataclasses import dataclass

from benchmarks.audit.attack import Attack, audit_releases
from benchmarks.audit.checks.clipping import audit_clipping
from benchmarks.audit.checks.memory import check_memory
from benchmarks.audit.checks.noise import check_noise
from benchmarks.audit.checks.sampling import check_sampling
from benchmarks.audit.configuration import Configuration, Stages


@dataclass(frozen=True)
class Audit:
    """The result of an audit.

    Attributes:
        attack: on the releases.
        problems: the certain faults, one line each.
    """

    attack: Attack
    problems: Sequence[str]

    @property
    def violated(self) -> bool:
        """Whether the claim does not hold."""
        return bool(self.problems) or self.attack.outcome == "violation"

    @property
    def suspicious(self) -> bool:
        """Whether the attack proved more than the claim, as chance does in one audit of 20."""
        return self.attack.outcome == "suspicious"


def audit_configuration(configuration: Configuration, *, stages: Stages | None = None) -> Audit:
    """Check and attack a private training: its clipping, sampling, noise, compressor and restarts.

    A correct training raises an alarm in one audit of 1,000 or less, over all checks together.

    Args:
        configuration: the training, which simulated ranks play.
        stages: makes the parts; by default those of the library.

    Raises:
        PrivacyError: if the rules refuse the configuration.
        ValueError: for a configuration that simulated ranks cannot play; see
            :meth:`Configuration.why_not_played`.

    Example::

        >>> from benchmarks.audit import Configuration, audit_configuration
        >>> configuration = Configuration(
        ...     noise_multiplier=1.0, max_grad_norm=1.0, sample_rate=0.1, steps=50, delta=1e-5
        ... )
        >>> audit_configuration(configuration).violated
        False
    """
    if reason := configuration.why_not_played():
        raise ValueError(reason)
    configuration.judge()
    stages = stages or Stages(configuration)
    sensitivity, problems = audit_clipping(stages)
    problems += [*check_noise(stages), *check_memory(stages), *check_sampling(stages)]
    return Audit(audit_releases(stages, sensitivity), problems)
