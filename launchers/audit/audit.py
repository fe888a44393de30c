"""Everything together: what is claimed, what attacks prove, and whether that contradicts it."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from comm_hooks.launchers.audit.bounds import gaussian_epsilon
from comm_hooks.launchers.audit.clipping import audit_clipping
from comm_hooks.launchers.audit.configuration import Configuration
from comm_hooks.launchers.audit.memory import check_memory
from comm_hooks.launchers.audit.noise import check_noise
from comm_hooks.launchers.audit.releases import ReleaseAudit, audit_releases
from comm_hooks.launchers.audit.sampling import check_sampling
from comm_hooks.launchers.audit.stages import Stages
from comm_hooks.launchers.audit.training import TrainingAudit, audit_training
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
class Attack:
    """One attack.

    Attributes:
        name: what was attacked.
        audited: the epsilon that it proves, at the confidence asked for.
        claimed: the epsilon that is claimed for the same releases.
        alarm: whether the claim is disproved at the confidence of an alarm.
        details: of how it went.
    """

    name: str
    audited: float
    claimed: float
    alarm: bool
    details: dict[str, Any]

    @property
    def outcome(self) -> str:
        """``"violation"``, ``"suspicious"`` (by chance in one audit of 20) or ``"none found"``."""
        if self.alarm:
            return "violation"
        return "suspicious" if self.audited > self.claimed else "none found"


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

        >>> from comm_hooks.launchers.audit import Configuration, audit_configuration
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
    clipping = audit_clipping(stages)
    problems = [
        *clipping.problems,
        *check_noise(stages),
        *check_memory(stages),
        *check_sampling(stages),
    ]
    releases = audit_releases(stages, clipping.sensitivity, confidence=confidence)
    training = audit_training(stages, confidence=confidence)
    delta = configuration.delta
    return Audit([_of_releases(releases, delta), _of_training(training)], problems)


def _of_releases(found: ReleaseAudit, delta: float) -> Attack:
    return Attack(
        "releases, where it is known who was drawn",
        gaussian_epsilon(found.mu, delta),
        gaussian_epsilon(found.claimed_mu, delta),
        found.surest_mu > found.claimed_mu,
        asdict(found),
    )


def _of_training(found: TrainingAudit) -> Attack:
    best = found.found
    return Attack(
        "training, where it is not",
        best.epsilon,
        found.claimed_epsilon,
        found.surest.epsilon > found.claimed_surest,
        {
            "steps": found.steps,
            "canaries": best.canaries,
            "guesses": best.guesses,
            "correct": best.correct,
        },
    )
