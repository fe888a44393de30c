"""Everything together: what is claimed, what attacks prove, and whether that contradicts it."""

from collections.abc import Sequence
from dataclasses import dataclass

from benchmarks.audit.attacks import Attack
from benchmarks.audit.attacks.releases import audit_releases
from benchmarks.audit.attacks.training import audit_training
from benchmarks.audit.checks.clipping import audit_clipping
from benchmarks.audit.checks.memory import check_memory
from benchmarks.audit.checks.noise import check_noise
from benchmarks.audit.checks.sampling import check_sampling
from benchmarks.audit.configuration import Configuration
from benchmarks.audit.stages import Stages
from comm_hooks.optim.private.accounting import Accountant, GaussianEvent
from comm_hooks.optim.private.accounting.events import seen_by
from comm_hooks.optim.private.errors import PrivacyError
from comm_hooks.optim.private.noise.placement import PLACES


@dataclass(frozen=True)
class Claim:
    """What is promised.

    Attributes:
        epsilon: against who sees the model at every step.
        checkpoint_epsilon: against who also sees what single ranks save; None: no protection.
        rank_epsilon: against who sees what single ranks send; None: no protection.
        delta: of all of them.
        steps: of the history that they are for.
    """

    epsilon: float
    checkpoint_epsilon: float | None
    rank_epsilon: float | None
    delta: float
    steps: int

    @classmethod
    def of(cls, events: Sequence[GaussianEvent], delta: float, accountant: Accountant) -> "Claim":
        """Return the claim for a history, whose events say where noise was added."""

        def epsilon(observer: str) -> float | None:
            try:
                return accountant.epsilon(seen_by(observer, events), delta)
            except PrivacyError:
                return None

        return cls(
            accountant.epsilon(events, delta),
            epsilon("checkpoint"),
            epsilon("rank"),
            delta,
            sum(event.steps for event in events),
        )


@dataclass(frozen=True)
class Audit:
    """What came out.

    Attributes:
        attacks: on the releases, and on a whole training.
        problems: what is wrong with certainty, in words.
    """

    attacks: list[Attack]
    problems: list[str]

    @property
    def violated(self) -> bool:
        """Whether a claim does not hold."""
        return bool(self.problems) or any(a.outcome == "violation" for a in self.attacks)

    @property
    def suspicious(self) -> bool:
        """Whether an attack went further than it should, as chance has it in one audit of 20."""
        return any(a.outcome == "suspicious" for a in self.attacks)


def why_not_played(configuration: Configuration) -> str | None:
    """Return why a configuration cannot be attacked here, or None."""
    if configuration.unit == "client":
        return "rounds of clients are not played, only looked up in the rules"
    if configuration.placement not in PLACES:
        return f"the library does not offer placement {configuration.placement!r}"
    return None


def audit_configuration(
    configuration: Configuration, *, stages: Stages | None = None, confidence: float = 0.95
) -> Audit:
    """Attack a private training: its clipping, sampling, noise, compressor and restarts.

    A violation is declared only where chance would bring it about in one audit of 1,000 or less,
    of all checks together, so a correct training can be audited every day.

    Args:
        configuration: what to play, on simulated ranks.
        stages: what makes its parts; by default the library's.  A subclass audits your own.
        confidence: of the bounds that are shown.

    Raises:
        PrivacyError: if the rules refuse the configuration.
        ValueError: for what cannot be played; see :func:`why_not_played`.

    Example::

        >>> from benchmarks.audit import Configuration, audit_configuration
        >>> configuration = Configuration(
        ...     noise_multiplier=1.0, max_grad_norm=1.0, sample_rate=0.1, steps=50, delta=1e-5
        ... )
        >>> audit_configuration(configuration).violated
        False
    """
    reason = why_not_played(configuration)
    if reason is not None:
        raise ValueError(reason)
    stages = stages or Stages(configuration)
    sensitivity, problems = audit_clipping(stages)
    problems += [
        *check_noise(stages),
        *check_memory(stages),
        *check_sampling(stages),
    ]
    attacks = [
        audit_releases(stages, sensitivity, confidence=confidence),
        audit_training(stages, confidence=confidence),
    ]
    return Audit(attacks, problems)
