"""Planted faults are found, and correct training is not accused.

Each fault meets the check of its part.  ``make audit-faults`` audits all of them as a whole.
"""

import os
import random
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import Any
from unittest import mock

import numpy as np
import pytest

from benchmarks.audit import Configuration, Stages, audit_configuration
from benchmarks.audit.attacks import releases
from benchmarks.audit.attacks.releases import audit_releases
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
from tests.benchmarks.audit.correct import correct_settings
from tests.benchmarks.audit.faults import FAULTS
from tests.benchmarks.audit.parts import MASK, TOPK, configuration, stages_of

CHECKS: dict[str, Callable[[Stages], Iterable[str]]] = {
    "clipping": lambda stages: audit_clipping(stages)[1],
    "noise": check_noise,
    "memory": check_memory,
    "sampling": check_sampling,
}
# One for each test in the checks.  The others are slow together.
SHOWN = {
    *("clipping: by_mean_norm", "clipping: with_momentum"),
    *("noise: of_period_97", "noise: not_at_the_end", "noise: in_a_subspace", "noise: cut_at_3"),
    *("noise: rounded", "noise: the_same_for_parameters", "noise: with_the_signs_of_sums"),
    *("memory: last_sum_again", "sampling: one_batch", "sampling: dealt_out_by_phases"),
    *("sampling: more_of_the_last", "sampling: never_empty", "sampling: in_pairs"),
    *("sampling: of_16_bits", "sampling: with_replacement", "sampling: ranks_turn_one_draw"),
}


@pytest.mark.parametrize(
    "name",
    [pytest.param(n, marks=[] if n in SHOWN else pytest.mark.slow) for n in FAULTS],
)
def test_the_check_of_its_part_finds_a_fault(name: str) -> None:
    problem = next(iter(CHECKS[name.split(":")[0]](stages_of(FAULTS[name]))), "")
    assert problem
    assert "\n" not in problem


def test_a_draw_that_ranks_turn_has_its_message() -> None:
    problem = check_sampling(stages_of(FAULTS["sampling: ranks_turn_one_draw"]))[-1]
    assert "sample i of rank 0 and sample i+1 of rank 1 are drawn together more often" in problem


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
    with mock.patch.object(releases, "_MOST_CANARIES", 128):
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
    assert check_memory(stages) == []


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(2))
def test_a_whole_audit_of_a_correct_training(seed: int) -> None:
    audit = audit_configuration(Configuration(**correct_settings(random.Random(seed))))
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
