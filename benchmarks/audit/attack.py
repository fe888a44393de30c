"""The attack on the noise: on releases, by an observer of the draws."""

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from scipy.optimize import brentq
from scipy.stats import beta, norm

from benchmarks.audit.checks.chances import SHARES
from benchmarks.audit.configuration import Configuration, Stages
from benchmarks.audit.world import World
from comm_hooks.exchange import ExchangeSettings

_MOST_CANARIES = 1024
_SIDE = 16
# Elements of all ranks in all steps: a few seconds.
_MOST_WORK = 20_000_000
# A residual must have the time to be sent.
_STEPS = 24
_FEW_STEPS = 8
_FEWEST_STEPS = 4
# Where all parameters are compressed as one vector, each canary needs a world of its own.
_CANARIES_ONE_BY_ONE = 96
# A few hundred canaries cannot exceed a larger claim, and a small fault not a smaller one.
_MOST_MU = 1.4
_NO_NOISE = 1e-6
# Of C: the range of canaries, whatever clipping lets pass.
_LEAST_CHANGE, _MOST_CHANGE = 1e-3, 10.0
_THRESHOLDS = 64
CONFIDENCE = 0.95
"""With this probability a bound that is shown holds."""


@dataclass(frozen=True)
class Attack:
    """The result of the attack.

    Attributes:
        audited: the epsilon that it proves, at 95 % confidence.
        claimed: the epsilon that is claimed for the same releases.
        alarm: whether it disproves the claim at the confidence of an alarm.
        mu, claimed_mu: the same as ``audited`` and ``claimed``, for the mu of Gaussian privacy.
        steps: the number of releases that each canary was in.
        canaries: their number.
    """

    audited: float
    claimed: float
    alarm: bool
    mu: float
    claimed_mu: float
    steps: int
    canaries: int

    @property
    def outcome(self) -> str:
        """``"violation"``, ``"suspicious"`` (by chance in one audit of 20) or ``"none found"``."""
        if self.alarm:
            return "violation"
        return "suspicious" if self.audited > self.claimed else "none found"


def audit_releases(
    stages: Stages, sensitivity: float = 1.0, *, confidence: float = CONFIDENCE
) -> Attack:
    r"""Attack the clipping, the noise, the compressor and the feedback, without the sampling.

    1. canaries get a coordinate each, in a parameter of their own, on all ranks in turn; by fair
       coins half of them are in every batch, with the largest change that clipping lets pass;
    2. take T steps on all ranks; half way all processes restart, and from there canaries have the
       opposite sign, so that repeated noise cancels;
    3. play the same with almost no noise, to find the clean release w_t of each canary; keep the
       half with the larger norm of w (all, if they are equal);
    4. a canary with x_t released has two scores: sum_t w_t x_t / |w|, the best one if noise is
       everywhere, and the same with x_t clamped to the range of w_t, the better one if much is
       released without noise;
    5. a quarter of the canaries chooses a threshold, the others count its errors, for those of each
       rank and for all together;
    6. :func:`gaussian_lower_bound` makes mu of them.

    The claim is mu = sqrt(T) / sigma.  A larger sigma is played where that exceeds 1.4, because a
    few hundred canaries prove no more than a mu of 3.

    A bound above the claim disproves it if canaries are independent trials, as they are in a
    correct step: coordinates have noise of their own, and parameters are compressed apart.  With
    ``granularity="bucket"``, the default of sketches, they are not: there each canary has a world
    of its own, and there are fewer.

    Args:
        stages: makes the parts.
        sensitivity: the largest change of a clipped sum by one sample, over C.
        confidence: of the bound that is shown; that of an alarm is 1 - 10^-4.
    """
    configuration = stages.configuration
    plan = _Plan.of(configuration)
    change = min(max(sensitivity, _LEAST_CHANGE), _MOST_CHANGE) * configuration.max_grad_norm
    sizes, scores, included = [], [], []
    for _ in range(plan.worlds):
        # From another generator than PyTorch's, which training may seed.
        coins = torch.from_numpy(np.random.default_rng().random(plan.canaries) < 0.5)
        places = torch.randint(_SIDE**2, (plan.canaries,))
        expected = _play(stages, plan, places, torch.ones_like(coins) * change, _NO_NOISE)
        released = _play(stages, plan, places, coins * change, plan.noise_multiplier)
        sizes.append(torch.linalg.vector_norm(expected, dim=0))
        scores.append(_scores(expected, released))
        included.append(coins)
    size, score, coins = torch.cat(sizes), torch.cat(scores, dim=1), torch.cat(included)
    rank = torch.arange(len(coins)) % configuration.world_size
    groups = [torch.ones_like(coins)]
    if configuration.world_size > 1:
        groups += [rank == r for r in range(configuration.world_size)]
    groups = [group & (size >= 0.99 * size[group].median()) for group in groups]

    def bound(level: float) -> float:
        each = 1 - (1 - level) / (len(groups) * len(score))
        return max(lower_bound(way[g], coins[g], each) for g in groups for way in score)

    claimed, mu = math.sqrt(plan.steps) / plan.noise_multiplier, bound(confidence)
    return Attack(
        audited=gaussian_epsilon(mu, configuration.delta),
        claimed=gaussian_epsilon(claimed, configuration.delta),
        alarm=bound(1 - SHARES["releases: bound"]) > claimed,
        mu=mu,
        claimed_mu=claimed,
        steps=plan.steps,
        canaries=len(coins),
    )


@dataclass(frozen=True)
class _Plan:
    """The number of worlds, of canaries in each and of steps, and the noise."""

    worlds: int
    canaries: int
    steps: int
    noise_multiplier: float

    @classmethod
    def of(cls, configuration: Configuration) -> "_Plan":
        ranks, block = configuration.world_size, configuration.exchange
        apart = ExchangeSettings.from_dict(block).granularity == "parameter"
        lasts = block["compressor"] != "identity" and apart
        steps = _STEPS if lasts else _FEW_STEPS if apart else _FEWEST_STEPS
        noise = max(configuration.noise_multiplier, math.sqrt(steps) / _MOST_MU)
        if not apart:
            return cls(_CANARIES_ONE_BY_ONE, 1, steps, noise)
        most = _MOST_WORK // (ranks * steps * _SIDE**2)
        return cls(1, max(128, ranks * 32, min(_MOST_CANARIES, most)), steps, noise)


def _play(
    stages: Stages, plan: _Plan, places: torch.Tensor, values: torch.Tensor, noise: float
) -> torch.Tensor:
    """Return the release at each canary's place, (steps, canaries), with undone signs."""
    shapes = {f"parameter {i}": (_SIDE, _SIDE) for i in range(plan.canaries)}
    world = World(stages, shapes, noise)
    canaries = torch.arange(plan.canaries)
    ranks = canaries % stages.configuration.world_size
    elements = canaries * _SIDE**2 + places
    seen = []
    for process, _ in world.steps(plan.steps // 2, plan.steps - plan.steps // 2):
        sign = -1.0 if process else 1.0
        world.sums()[ranks, elements] = sign * values
        seen.append(sign * world.release()[elements])
    return torch.stack(seen)


def _scores(expected: torch.Tensor, released: torch.Tensor) -> torch.Tensor:
    """Return two scores of each canary, (2, canaries), from (steps, canaries)."""
    size = torch.linalg.vector_norm(expected, dim=0).clamp(min=1e-30)
    most = expected.abs()
    clamped = released.clamp(-most, most)
    return torch.stack([(expected * seen).sum(0) / size for seen in (released, clamped)])


Bound = Callable[[int, int, int, int, float], float]
"""A lower bound by wrong answers of a threshold test; see :func:`gaussian_lower_bound`."""


def lower_bound(
    scores: torch.Tensor,
    included: torch.Tensor,
    confidence: float,
    of_errors: Bound | None = None,
) -> float:
    """Return what a threshold test of scores proves: by default a mu of Gaussian privacy.

    Args:
        scores: of the trials, (n,).  A quarter of them chooses the threshold.
        included: whether the sample was in.
        confidence: the probability with which the bound holds.
        of_errors: the bound by the numbers of wrong answers.
    """

    def mu_of(part: slice, threshold: float) -> float:
        positive, truth = scores[part] > threshold, included[part]
        return (of_errors or gaussian_lower_bound)(
            int((positive & ~truth).sum()),
            int((~truth).sum()),
            int((~positive & truth).sum()),
            int(truth.sum()),
            confidence,
        )

    chosen, counted = slice(0, len(scores) // 4), slice(len(scores) // 4, None)
    candidates = torch.quantile(scores[chosen], torch.linspace(0, 1, _THRESHOLDS))
    # Between two scores: one equal to the threshold would be on either side by chance.
    candidates = torch.unique((candidates[1:] + candidates[:-1]) / 2)
    return mu_of(counted, max(candidates.tolist(), key=lambda t: mu_of(chosen, t)))


def gaussian_lower_bound(
    false_positives: int, absent: int, false_negatives: int, present: int, confidence: float = 0.95
) -> float:
    r"""Return the mu of the Gaussian mechanism that a threshold test proves.

    A mechanism is mu-GDP if no test tells its outputs with and without one sample apart better than
    one draw of N(mu, 1) from one of N(0, 1).  Noise of sigma, in T steps with the sample in each
    batch, has mu = sqrt(T) / sigma.  The bound is

        mu >= Phi^-1(1 - a) - Phi^-1(b)

    with a and b the upper Clopper-Pearson limits of both error rates, at (1 + confidence) / 2 each.
    A bound above the claimed mu disproves the claim, for any mechanism.

    Source: Nasr et al., "Tight Auditing of Differentially Private Machine Learning", USENIX
    Security 2023; Dong, Roth and Su, "Gaussian Differential Privacy", JRSS B 2022.

    Args:
        false_positives: wrong answers among the ``absent`` trials without the sample.
        false_negatives: wrong answers among the ``present`` trials with the sample.
        confidence: the probability, between 0 and 1, with which the bound holds.

    Example::

        >>> from benchmarks.audit.attack import gaussian_lower_bound
        >>> round(gaussian_lower_bound(31, 100, 31, 100), 2)  # the truth may be 1
        0.45
    """
    errors = error_limits(false_positives, absent, false_negatives, present, confidence)
    return max(0.0, float(norm.isf(errors).sum())) if max(errors) < 1 else 0.0


def error_limits(
    false_positives: float,
    absent: float,
    false_negatives: float,
    present: float,
    confidence: float,
) -> tuple[float, float]:
    """Return the upper Clopper-Pearson limits of both error rates, which hold together."""
    each = 1 - (1 - confidence) / 2
    counts = ((false_positives, absent), (false_negatives, present))
    # Without a right answer the limit is 1, which ``beta.ppf`` leaves out.
    one, other = (1.0 if k == n else float(beta.ppf(each, k + 1, n - k)) for k, n in counts)
    return one, other


def gaussian_epsilon(mu: float, delta: float) -> float:
    """Return the exact epsilon of a mu-GDP mechanism.

    delta = Phi(mu / 2 - epsilon / mu) - e^epsilon Phi(-mu / 2 - epsilon / mu), solved for epsilon
    (Balle and Wang, "Improving the Gaussian Mechanism for Differential Privacy", ICML 2018).

    Example::

        >>> from benchmarks.audit.attack import gaussian_epsilon
        >>> round(gaussian_epsilon(1.0, delta=1e-5), 2)
        4.38
    """
    if mu <= 0:
        return 0.0

    def excess(epsilon: float) -> float:
        """Return the difference between delta and the delta of this epsilon."""
        upper, lower = norm.logcdf(np.array([1, -1]) * mu / 2 - epsilon / mu)
        # e^epsilon alone may overflow where the product is small.
        return delta - math.exp(upper) + math.exp(epsilon + lower)

    if excess(0.0) >= 0:
        return 0.0
    return float(brentq(excess, 0.0, mu * mu / 2 + 40 * mu, xtol=1e-9))
