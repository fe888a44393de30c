"""Planted faults are found, and correct training is not accused.

Each fault meets the check of its part.
"""

import math
import os
import random
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import Any
from unittest import mock

import numpy as np
import pytest
from scipy.stats import binom

from benchmarks.audit import Configuration, Stages, attack, audit_configuration
from benchmarks.audit.attack import audit_releases, gaussian_epsilon, gaussian_lower_bound
from benchmarks.audit.checks.chances import (
    MOST_FALSE_ALARMS,
    SHARES,
    largest_correlation,
    log_tail,
    smallest_energy,
)
from benchmarks.audit.checks.clipping import audit_clipping
from benchmarks.audit.checks.memory import check_memory
from benchmarks.audit.checks.noise import check_noise
from benchmarks.audit.checks.sampling import check_sampling, examine
from benchmarks.audit.configuration import Mechanism
from benchmarks.audit.world import fixed_secrets
from comm_hooks.exchange import Exchange
from tests.benchmarks.audit import (
    faults_of_clipping,
    faults_of_memory,
    faults_of_noise,
    faults_of_sampling,
)
from tests.benchmarks.audit.correct import ODD, correct_settings
from tests.benchmarks.audit.parts import MASK, TOPK, Fault, configuration, stages_of

FAULTS: dict[str, Fault] = {
    **faults_of_clipping.FAULTS,
    **faults_of_noise.FAULTS,
    **faults_of_memory.FAULTS,
    **faults_of_sampling.FAULTS,
}
CHECKS: dict[str, Callable[[Stages], Iterable[str]]] = {
    "clipping": lambda stages: audit_clipping(stages)[1],
    "noise": check_noise,
    "memory": check_memory,
    "sampling": check_sampling,
}
# One for each test in the checks, and a part of its message.
SHOWN = {
    "clipping: by_mean_norm": "one sample changes a clipped sum by",
    "clipping: with_momentum": "a sample of earlier steps changes a clipped sum",
    "noise: of_period_97": "is correlated by",
    "noise: not_at_the_end": "times the standard deviation",
    "noise: cut_at_3": "the noise is not normal",
    "noise: the_same_for_parameters": "apart, within a step, is correlated",
    "noise: with_the_signs_of_sums": "the noise depends on",
    "memory: last_sum_again": "a sample in the sum of step",
    "sampling: dealt_out_by_phases": "have less samples in common than chance",
    "sampling: more_of_the_last": "instead of the claimed sample_rate",
    "sampling: never_empty": "an empty batch is a step",
    "sampling: in_pairs": "batch sizes vary more than",
    "sampling: of_16_bits": "processes drew the batch of another one",
    "sampling: with_replacement": "draws a sample twice for step",
    "sampling: ranks_turn_one_draw": "sample i of rank 0 and sample i+1 of rank 1 are drawn",
}
# A part of each check; all others are slow together.
FAST = {
    "clipping: by_mean_norm",
    "noise: cut_at_3",
    "noise: with_the_signs_of_sums",
    "sampling: dealt_out_by_phases",
    "sampling: never_empty",
    "sampling: of_16_bits",
    "sampling: with_replacement",
}


@pytest.mark.parametrize(
    "name",
    [pytest.param(n, marks=[] if n in FAST else pytest.mark.slow) for n in FAULTS],
)
def test_the_check_of_its_part_finds_a_fault(name: str) -> None:
    problems = CHECKS[name.split(":")[0]](stages_of(FAULTS[name]))
    problem = next((problem for problem in problems if SHOWN.get(name, "") in problem), "")
    assert problem
    assert "\n" not in problem


@pytest.mark.slow
@pytest.mark.parametrize("name", ["memory: noise_on_rank_zero", "memory: noise_after_feedback"])
def test_the_attack_reads_clean_payloads(name: str) -> None:
    found = audit_releases(stages_of(FAULTS[name]))
    assert found.audited > found.claimed


class AlmostNoNoise(Stages):
    """A thousandth of the claim, so that every guess of the attack is right."""

    def mechanism(self, exchange: Exchange, noise_multiplier: float) -> Mechanism:
        return super().mechanism(exchange, noise_multiplier / 1000)


@pytest.mark.parametrize(
    ("stages", "outcome"), [(AlmostNoNoise, "violation"), (Stages, "none found")]
)
def test_the_attack_notices_less_noise_than_claimed(stages: type[Stages], outcome: str) -> None:
    # Without errors 128 canaries prove a mu of 1.7 at the confidence of an alarm; 1.4 is claimed.
    with mock.patch.object(attack, "_MOST_CANARIES", 128):
        assert audit_releases(stages(configuration(world_size=1))).outcome == outcome


VALID = [
    ("central", {"compressor": "identity"}),
    ("central", TOPK),
    ("local", {**TOPK, "granularity": "bucket"}),
    ("shares", {**MASK, "memory": "none"}),
    ("aggregate", {**MASK, "memory": "none"}),
]


@pytest.mark.slow
@pytest.mark.parametrize(("placement", "exchange"), VALID)
def test_no_alarm_where_nothing_is_wrong(placement: str, exchange: dict[str, Any]) -> None:
    stages = Stages(configuration(placement=placement, exchange=exchange))
    assert list(check_noise(stages)) == []
    assert list(check_memory(stages)) == []


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(4))
def test_a_whole_audit_of_a_correct_training(seed: int) -> None:
    audit = audit_configuration(Configuration(**correct_settings(random.Random(seed))))
    assert audit.problems == []
    assert not audit.violated


@pytest.mark.slow
@pytest.mark.parametrize("name", ODD)
def test_a_whole_audit_of_odd_parts(name: str) -> None:
    stages = stages_of(ODD[name])
    audit = audit_configuration(stages.configuration, stages=stages)
    assert audit.problems == []
    assert not audit.violated


def test_draws_of_other_threads_do_not_come_in_between() -> None:
    def draw() -> bytes:
        return os.urandom(8)

    with ThreadPoolExecutor(1) as pool, fixed_secrets(1):
        first, of_another, second = draw(), pool.submit(draw).result(), draw()
    with fixed_secrets(1):
        assert [draw(), draw()] == [first, second]
    assert of_another not in (first, second)


@pytest.mark.parametrize("rate", [0.002, 0.05, 0.5, 0.97])
def test_poisson_samples_are_not_accused(rate: float) -> None:
    masks = np.random.default_rng().random((2, 2, 100, 2000)) < rate
    assert examine(masks, rate) == []


def test_false_alarms_are_within_their_budget() -> None:
    assert sum(SHARES.values()) <= MOST_FALSE_ALARMS


def test_limits_of_chance_hold() -> None:
    """Each for a probability of 1 %, in 20,000 trials; 1.3 % would be four deviations more."""
    rng = np.random.default_rng(3)
    trials = 20_000
    energies = rng.chisquare(50, trials) / 50
    assert (energies < smallest_energy(50, 0.01)).mean() < 0.013
    vectors = rng.standard_normal((2, trials, 40))
    vectors /= np.linalg.norm(vectors, axis=2, keepdims=True)
    cosines = np.abs((vectors[0] * vectors[1]).sum(1))
    assert (cosines > largest_correlation(40, 0.01)).mean() < 0.013
    counts = rng.binomial(500, 0.02, trials)
    over = (counts > 10) & (log_tail(counts, 500, 0.02) < np.log(0.01))
    assert 0 < over.mean() < 0.01


@pytest.mark.slow
def test_bounds_are_not_far_below_the_truth() -> None:
    """An audit that proves nothing would never raise an alarm either."""
    stages = Stages(configuration())
    found = audit_releases(stages)
    assert found.mu > 0.5 * found.claimed_mu
    assert audit_clipping(stages)[0] == pytest.approx(1.0, rel=1e-3)


@pytest.mark.slow
def test_audits_of_a_correct_training_exceed_the_claim_rarely() -> None:
    """Of 15 audits at 80 % confidence three may; that 12 do has a probability of 1e-6."""
    stages = Stages(configuration(world_size=1))
    excess = 0
    for _ in range(15):
        found = audit_releases(stages, confidence=0.8)
        excess += found.audited > found.claimed
        assert found.outcome != "violation"
    assert excess < 12


def test_a_gaussian_is_not_accused_more_often_than_agreed() -> None:
    mu, trials, runs = 1.0, 300, 2000
    rng = np.random.default_rng(8)
    wrong = 0.5 * math.erfc(mu / 2 / math.sqrt(2))
    bounds = [
        gaussian_lower_bound(int(p), trials, int(n), trials, 0.9)
        for p, n in rng.binomial(trials, wrong, size=(runs, 2))
    ]
    assert binom.sf(sum(bound > mu for bound in bounds) - 1, runs, 0.1) > 1e-6
    assert sorted(bounds)[runs // 2] > 0.7


@pytest.mark.parametrize("mu", [0.3, 1.0, 4.0])
def test_epsilon_of_a_gaussian_solves_its_equation(mu: float) -> None:
    def cdf(x: float) -> float:
        return math.erfc(-x / math.sqrt(2)) / 2

    epsilon = gaussian_epsilon(mu, 1e-5)
    delta = cdf(mu / 2 - epsilon / mu) - math.exp(epsilon) * cdf(-mu / 2 - epsilon / mu)
    assert delta == pytest.approx(1e-5, rel=1e-6)
    assert gaussian_epsilon(0.0, 1e-5) == 0
