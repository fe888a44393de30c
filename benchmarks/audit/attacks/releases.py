"""The strongest attack on the noise: on releases in which everybody knows who was drawn."""

import math
from dataclasses import dataclass

import torch

from benchmarks.audit.attacks import Attack
from benchmarks.audit.attacks.bounds import gaussian_epsilon, gaussian_lower_bound
from benchmarks.audit.attacks.one_run import fair_coins
from benchmarks.audit.checks.chances import SHARES
from benchmarks.audit.configuration import Configuration
from benchmarks.audit.stages import Stages
from benchmarks.audit.world import World
from comm_hooks.exchange import ExchangeSettings

_MOST_CANARIES = 1024
_SIDE = 16
# Of all elements of all ranks in all steps: a few seconds.
_MOST_WORK = 20_000_000
# What error feedback holds back must have time to come.
_STEPS = 24
_FEW_STEPS = 8
_FEWEST_STEPS = 4
# Where one vector is made of all parameters, canaries are not apart: one world for each.
_CANARIES_ONE_BY_ONE = 96
# A larger claim could not be exceeded by what a few hundred canaries prove, a smaller one would not
# be exceeded by a small fault.
_MOST_MU = 1.4
_NO_NOISE = 1e-6
# Of C: canaries are this large at least, and at most, whatever clipping lets pass.
_LEAST_CHANGE, _MOST_CHANGE = 1e-3, 10.0
_THRESHOLDS = 64


def audit_releases(
    stages: Stages,
    sensitivity: float = 1.0,
    *,
    confidence: float = 0.95,
    alarm_confidence: float = 1 - SHARES["releases: bound"],
) -> Attack:
    r"""Attack the clipping, the noise, the compressor and the feedback, without the sampling.

    1. the largest change that one sample makes to a clipped sum has been found by trying;
    2. canaries get a coordinate each, in a parameter of their own, on all ranks in turn; by fair
       coins half of them are in, and then in every batch with that change;
    3. T steps are taken on all ranks; half way all processes are started again, and from there
       canaries have the opposite sign, so that noise that comes again cancels;
    4. what each canary would release without noise, w_t, is found by playing the same with next to
       none; the half with the larger norm of w is kept (all, if they are equal);
    5. a canary with x_t released has two scores: sum_t w_t x_t / |w|, the best one if noise is
       everywhere, and the same with x_t clamped to what w_t makes possible, the better one if much
       is released without noise;
    6. a quarter of the canaries chooses a threshold, the others count its errors, for those of each
       rank and for all together;
    7. :func:`~benchmarks.audit.attacks.bounds.gaussian_lower_bound` makes mu of them.

    What is claimed is sqrt(T) / sigma.  With a sigma that makes it more than 1.4 a larger one is
    played, because a few hundred canaries prove no more than a mu of 3.

    An excess refutes the claim if canaries are independent trials, as they are in a correct step:
    coordinates have noise of their own, and parameters are compressed apart.  They are not with
    ``granularity="bucket"``, the default of sketches: there each canary has a world of its own, and
    there are fewer.

    Args:
        stages: what makes the parts.
        sensitivity: that change, over C.
        confidence, alarm_confidence: of the two bounds.

    Returns:
        The attack; its details have mu at both confidences and as it is claimed, the sensitivity,
        how many releases each canary was in, and how many canaries there were.
    """
    configuration = stages.configuration
    sensitivity = min(max(sensitivity, _LEAST_CHANGE), _MOST_CHANGE)
    plan = _Plan.of(configuration)
    change = sensitivity * configuration.max_grad_norm
    sizes, scores, included = [], [], []
    for _ in range(plan.worlds):
        coins = fair_coins(plan.canaries)
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
    bounds: list[float] = []
    for level in (confidence, alarm_confidence):
        each = 1 - (1 - level) / (len(groups) * len(score))
        bounds.append(
            max(
                _lower_bound(way[group], coins[group], each)
                for group in (group & (size >= 0.99 * size[group].median()) for group in groups)
                for way in score
            )
        )
    claimed = math.sqrt(plan.steps) / plan.noise_multiplier
    mu, surest_mu = bounds
    return Attack(
        "releases, where it is known who was drawn",
        gaussian_epsilon(mu, configuration.delta),
        gaussian_epsilon(claimed, configuration.delta),
        surest_mu > claimed,
        {
            "mu": mu,
            "surest_mu": surest_mu,
            "claimed_mu": claimed,
            "sensitivity": sensitivity,
            "steps": plan.steps,
            "canaries": len(coins),
        },
    )


@dataclass(frozen=True)
class _Plan:
    """How many worlds, canaries in each and steps, and with which noise."""

    worlds: int
    canaries: int
    steps: int
    noise_multiplier: float

    @classmethod
    def of(cls, configuration: Configuration) -> "_Plan":
        ranks = configuration.world_size
        block = configuration.exchange
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
    """Return what is released at every canary's place, (steps, canaries), signs undone."""
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


def _lower_bound(scores: torch.Tensor, included: torch.Tensor, confidence: float) -> float:
    """Return mu from scores and the truth."""
    few = len(scores) // 4
    chosen, counted = slice(0, few), slice(few, None)
    candidates = torch.quantile(scores[chosen], torch.linspace(0, 1, _THRESHOLDS))
    # Between two scores: one that is equal to a threshold would be on either side by chance.
    candidates = torch.unique((candidates[1:] + candidates[:-1]) / 2)
    threshold = max(
        candidates.tolist(),
        key=lambda t: _mu_of(scores[chosen], included[chosen], t, confidence),
    )
    return _mu_of(scores[counted], included[counted], threshold, confidence)


def _mu_of(
    scores: torch.Tensor, included: torch.Tensor, threshold: float, confidence: float
) -> float:
    positive = scores > threshold
    return gaussian_lower_bound(
        int((positive & ~included).sum()),
        int((~included).sum()),
        int((~positive & included).sum()),
        int(included.sum()),
        confidence,
    )
