"""The attack on a whole training: who was drawn is secret, and is found out where it can be."""

import math

import torch

from benchmarks.audit.attacks import Attack
from benchmarks.audit.attacks.one_run import OneRunAudit, fair_coins, guess
from benchmarks.audit.checks.chances import SHARES
from benchmarks.audit.stages import Stages
from benchmarks.audit.world import World, user_seed
from comm_hooks.optim.private.accounting import GaussianEvent

_CANARIES = 1024
_MOST_STEPS = 400
# Of all elements of all ranks in all steps: a few seconds.
_MOST_WORK = 6_600_000


def audit_training(
    stages: Stages,
    *,
    confidence: float = 0.95,
    alarm_confidence: float = 1 - SHARES["training: bound"],
) -> Attack:
    r"""Attack a whole training, sampling included, by one-run auditing.

    1. canary j is sample j of rank j mod N, is in the dataset by a fair coin, and has a gradient of
       norm C in a coordinate of its own; the samples j of the other ranks are its others,
       always in the dataset, with gradients of norm C in one coordinate that they share;
    2. T steps with Poisson sampling on every rank, started again half way;
    3. two scores for each canary: with x_t what was released at its coordinate in step t, y_t at
       its others', both over C, and v the variance of the noise,

       * the likelihood ratio, sum_t log(1 - q + q exp((x_t - 1/2) / v));
       * sum_t p_t x_t, with p_t the probability, given y_t, that all others were drawn in
         step t: if masks are the same on all ranks, then so was the canary;

    4. :func:`~benchmarks.audit.audit_one_run` guesses, and what is claimed is the
       accountant's epsilon of T steps.

    With a sparsifying compressor the attacker sees little of most canaries, and proves less.

    Args:
        stages: what makes the parts.
        confidence, alarm_confidence: of the two bounds.
    """
    configuration = stages.configuration
    ranks, rate = configuration.world_size, configuration.sample_rate
    affordable = _MOST_WORK // (ranks * 2 * _CANARIES)
    steps = max(2, min(configuration.steps, _MOST_STEPS, affordable))
    coins = fair_coins(_CANARIES)
    seen = _play(stages, coins, steps) / configuration.max_grad_norm
    variance = configuration.judge().variance_of_sum or 1.0
    variance *= configuration.noise_multiplier**2
    own, others = seen[:, 0], seen[:, 1]
    exponent = (own - 0.5) / variance + math.log(rate)
    scores = [torch.logaddexp(exponent, torch.tensor(math.log1p(-rate * (1 - 1e-9)))).sum(0)]
    if ranks > 1 and rate < 1:
        all_of_them = ranks - 1
        odds = all_of_them * (others - all_of_them / 2) / variance
        drawn = torch.sigmoid(odds + math.log(rate / (1 - rate)))
        scores.append((drawn * own).sum(0))
    accountant = configuration.build_accountant()
    event = GaussianEvent(configuration.noise_multiplier, rate, steps)

    def bound(delta: float, level: float) -> tuple[OneRunAudit, float]:
        found = guess(torch.stack(scores), coins, delta=delta, confidence=level)
        return found, accountant.epsilon([event], delta)

    found, claimed = bound(configuration.delta, confidence)
    # With delta itself the theorem proves nothing at a high confidence, for want of 2 m delta.
    surest, claimed_surest = bound(configuration.delta / 100, alarm_confidence)
    return Attack(
        "training, where it is not",
        found.epsilon,
        claimed,
        surest.epsilon > claimed_surest,
        {
            "steps": steps,
            "canaries": found.canaries,
            "guesses": found.guesses,
            "correct": found.correct,
        },
    )


def _play(stages: Stages, included: torch.Tensor, steps: int) -> torch.Tensor:
    """Return what is released at canaries' and others' places, (steps, 2, canaries)."""
    configuration = stages.configuration
    ranks = configuration.world_size
    canaries = len(included)
    on_rank = torch.arange(canaries) % ranks
    world = World(stages, {"weight": (2, canaries)}, configuration.noise_multiplier)
    seen = torch.zeros(steps, 2, canaries)
    for process in (range(steps // 2), range(steps // 2, steps)):
        if process.start:
            world.start()
        batches = [draw(stages, rank, canaries, len(process)) for rank in range(ranks)]
        for step, drawn in zip(process, zip(*batches, strict=True), strict=True):
            all_sums = world.sums().view(ranks, 2, canaries)
            for rank, (sums, indices) in enumerate(zip(all_sums, drawn, strict=True)):
                mask = torch.zeros(canaries)
                mask[indices] = configuration.max_grad_norm
                sums[0] = mask * (included & (on_rank == rank))
                sums[1] = mask * (on_rank != rank)
            seen[step] = world.release().view(2, canaries)
    return seen


def draw(stages: Stages, rank: int, num_samples: int, steps: int) -> list[torch.Tensor]:
    """Return the batches of one rank that has just been started, as indices."""
    with user_seed():
        sampler = stages.sampler(rank, num_samples, steps)
        return [torch.tensor(indices, dtype=torch.long) for indices in sampler]
