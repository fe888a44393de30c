"""Planted faults are found, and correct training is not accused.

Each fault is shown to the check that is to find it.  ``make audit-faults`` audits all of them as a
whole.
"""

import os
import random
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
import torch

from benchmarks.audit import Configuration, Stages, audit_configuration
from benchmarks.audit.attacks.releases import audit_releases
from benchmarks.audit.attacks.training import audit_training
from benchmarks.audit.audit import Audit
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
from benchmarks.audit.world import fixed_secrets
from tests.benchmarks.audit import planted
from tests.benchmarks.audit.correct import correct_settings
from tests.benchmarks.audit.faults import BY_CHECK, FAULTS, configuration, stages_of
from tests.benchmarks.audit.faults_of_memory import MASK as REMEMBERING_MASK
from tests.benchmarks.audit.faults_of_memory import TOPK, NoiseAfterFeedback, NoiseOnRankZero
from tests.benchmarks.audit.faults_of_noise import TooLittleNoise
from tests.benchmarks.audit.faults_of_sampling import SameMasksOnAllRanks

MASK = {**REMEMBERING_MASK, "memory": "none"}
CHECKS: dict[str, Callable[[Stages], Iterable[str]]] = {
    "clipping": lambda stages: audit_clipping(stages)[1],
    "noise": check_noise,
    "memory": check_memory,
    "sampling": check_sampling,
}
# Two seconds each: the others are left to ``make audit-faults``.
SLOW = {
    "clipping": {"each_layer", "without_scalars"},
    "memory": {"leaks a twentieth", "after a restart", "noise after feedback"},
}
LONG = {
    "clipping: each_layer",
    "clipping: without_scalars",
    "memory: noise after feedback",
    "noise: negated",
    "noise: none on the last rank",
    "memory: leaks a twentieth",
    "noise: of_16_bits",
    "noise: replayed",
    "noise: same on all ranks",
    "noise: twice the variance said",
    "noise: small_beyond_the_first_piece",
    "noise: permuted",
    "noise: in_pieces_of_512",
    "memory: after a restart",
}
SHOWN = [
    pytest.param(name, marks=[pytest.mark.slow] if name in LONG else [])
    for check, faults in BY_CHECK.items()
    for name in faults
    if check not in SLOW or name.split(": ")[1] in SLOW[check]
]


@pytest.fixture(autouse=True)
def _one_thread() -> Any:
    """As the command does: on a busy machine threads wait for one another."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.mark.parametrize("name", SHOWN)
def test_the_check_that_looks_for_a_fault_finds_it(name: str) -> None:
    problem = next(iter(CHECKS[name.split(":")[0]](stages_of(FAULTS[name]))), "")
    assert problem
    assert "\n" not in problem


def test_ranks_that_turn_one_draw_are_found() -> None:
    """Of 24 faults that others had planted, the one that was missed at first."""
    (problem,) = check_sampling(stages_of(planted.FAULTS["ranks_turn_one_draw"]))[-1:]
    assert "sample i of rank 0 and sample i+1 of rank 1 are drawn together more often" in problem


@pytest.mark.slow
def test_noise_on_one_rank_before_a_compressor_of_each() -> None:
    exchange = {**TOPK, "memory": "none", "collective": "all_gather"}
    found = audit_releases(NoiseOnRankZero(configuration(placement="local", exchange=exchange)))
    assert found.outcome == "violation"
    # What is sent clean is told from noise exactly, not only better than claimed.
    assert found.details["mu"] > 2 * found.details["claimed_mu"]


@pytest.mark.slow
def test_noise_after_error_feedback_gives_samples_away() -> None:
    found = audit_releases(NoiseAfterFeedback(configuration(exchange=MASK)))
    assert found.audited > found.claimed


def test_less_noise_than_is_claimed_gives_samples_away() -> None:
    found = audit_releases(TooLittleNoise(configuration()))
    assert found.audited > found.claimed


@pytest.mark.slow
def test_the_same_masks_on_all_ranks_give_samples_away() -> None:
    settings = {"world_size": 8, "noise_multiplier": 1.0, "sample_rate": 0.02, "steps": 400}
    found = audit_training(SameMasksOnAllRanks(configuration(**settings)))
    assert found.audited > found.claimed


VALID = [
    ("central", {"compressor": "identity"}),
    ("central", TOPK),
    ("local", {**TOPK, "granularity": "bucket"}),
    ("shares", MASK),
    ("aggregate", MASK),
]


@pytest.mark.slow
@pytest.mark.parametrize(("placement", "exchange"), VALID)
def test_no_alarm_where_nothing_is_wrong(placement: str, exchange: dict[str, Any]) -> None:
    stages = Stages(configuration(placement=placement, exchange=exchange))
    assert list(check_noise(stages)) == []
    assert check_memory(stages) == []


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(2))
def test_a_whole_audit_of_what_is_correct(seed: int) -> None:
    settings = correct_settings(random.Random(seed))
    audit = audit_configuration(Configuration(**{**settings, "unit": "sample"}))
    assert isinstance(audit, Audit)
    assert audit.problems == []
    assert not audit.violated


def test_what_other_threads_draw_does_not_come_in_between() -> None:
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


def test_alarms_by_chance_are_within_their_budget() -> None:
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
def test_bounds_are_not_far_below_what_is_true() -> None:
    """An audit that proves nothing would never raise an alarm either."""
    stages = Stages(configuration())
    found = audit_releases(stages)
    assert found.details["mu"] > 0.5 * found.details["claimed_mu"]
    assert audit_clipping(stages)[0] == pytest.approx(1.0, rel=1e-3)
    everything = {"sample_rate": 1.0, "noise_multiplier": 4.0, "steps": 20}
    training = audit_training(Stages(configuration(**everything)))
    assert training.audited > 0.2 * training.claimed


@pytest.mark.slow
def test_audits_of_what_is_correct_exceed_the_claim_as_rarely_as_they_say() -> None:
    """Of 15 audits at 80 % confidence three may; that 12 do has a probability of 1e-6."""
    stages = Stages(configuration(world_size=1))
    excess = 0
    for _ in range(15):
        found = audit_releases(stages, confidence=0.8)
        excess += found.audited > found.claimed
        assert found.outcome != "violation"
    assert excess < 12
