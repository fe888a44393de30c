"""Planted faults are found, and correct training is not accused."""

from typing import Any

import pytest
import torch

from comm_hooks.launchers.audit import Configuration, Stages, audit_configuration
from comm_hooks.launchers.audit.audit import Audit
from comm_hooks.launchers.audit.releases import ReleaseAudit, audit_releases, find_sensitivity
from comm_hooks.launchers.audit.repeats import find_repeated_masks, find_repeated_noise
from comm_hooks.launchers.audit.sampling import audit_training
from tests.launchers.audit.faults import (
    ClippedByMeans,
    NoiseAfterFeedback,
    NoiseOnRankZero,
    ReplayedNoise,
    SameMasksOnAllRanks,
    TooLittleNoise,
)

MASK = {"compressor": "random_k", "density": 0.125, "unbiased": False, "memory": "none"}
TOPK = {"compressor": "topk", "density": 0.0625}


@pytest.fixture(autouse=True)
def _one_thread() -> Any:
    """As the command does: on a busy machine threads wait for one another."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def configuration(**changes: Any) -> Configuration:
    settings: dict[str, Any] = {
        "noise_multiplier": 2.0,
        "max_grad_norm": 0.5,
        "sample_rate": 0.05,
        "expected_batch_size": 10.0,
        "steps": 60,
        "delta": 1e-5,
        "world_size": 2,
    }
    return Configuration(**{**settings, **changes})


def exceeds(found: ReleaseAudit) -> bool:
    return found.mu > found.claimed_mu


def is_alarm(found: ReleaseAudit) -> bool:
    return found.surest_mu > found.claimed_mu


def test_micro_batches_that_are_clipped_as_one() -> None:
    stages = ClippedByMeans(configuration())
    assert find_sensitivity(stages) == pytest.approx(2.0, rel=1e-3)
    assert exceeds(audit_releases(stages))


def test_noise_that_comes_again_after_a_restart() -> None:
    stages = ReplayedNoise(configuration())
    assert is_alarm(audit_releases(stages))
    assert "of process 2 is correlated by 1.00" in find_repeated_noise(stages)[0]


def test_noise_on_one_rank_before_a_compressor_of_each() -> None:
    exchange = {**TOPK, "memory": "none", "collective": "all_gather"}
    found = audit_releases(NoiseOnRankZero(configuration(placement="local", exchange=exchange)))
    assert is_alarm(found)
    # What is sent clean is told from noise exactly, not only better than claimed.
    assert found.mu > 2 * found.claimed_mu


def test_noise_after_error_feedback() -> None:
    assert exceeds(audit_releases(NoiseAfterFeedback(configuration(exchange=MASK))))


def test_less_noise_than_is_claimed() -> None:
    stages = TooLittleNoise(configuration())
    assert exceeds(audit_releases(stages))
    assert find_repeated_noise(stages) == [
        "the noise has 0.25 times the variance that is claimed for the sum over ranks"
    ]


def test_the_same_masks_on_all_ranks() -> None:
    settings = {"world_size": 8, "noise_multiplier": 1.0, "sample_rate": 0.02, "steps": 400}
    stages = SameMasksOnAllRanks(configuration(**settings))
    found = audit_training(stages)
    assert found.found.epsilon > found.claimed_epsilon
    problem = find_repeated_masks(stages)[0]
    assert "(and 55 more pairs) draw the same samples" in problem
    assert "rank 0 in process 1 and rank 1 in process 1" in problem


def test_masks_that_come_again_after_a_restart() -> None:
    class Replayed(Stages):
        def sampler(self, rank: int, num_samples: int, steps: int) -> Any:
            from comm_hooks.optim.private.poisson import PoissonSampler
            from comm_hooks.optim.private.secret import Secret

            secret = Secret(b"the same in every process")
            rate = self.configuration.sample_rate
            return PoissonSampler(num_samples, rate, steps, secret=secret, rank=rank)

    problem = find_repeated_masks(Replayed(configuration()))[0]
    assert problem.startswith("rank 0 in process 1 and rank 0 in process 2 (and 1 more pairs)")


def test_more_samples_than_are_claimed() -> None:
    class Twice(Stages):
        def sampler(self, rank: int, num_samples: int, steps: int) -> Any:
            from comm_hooks.optim.private.poisson import PoissonSampler

            return PoissonSampler(num_samples, 2 * self.configuration.sample_rate, steps)

    problems = find_repeated_masks(Twice(configuration()))
    assert len(problems) >= 4
    assert problems[0].startswith("rank 0 in process 1 draws samples with probability ")
    assert problems[0].endswith(", not with the sample_rate 0.05 that is claimed")


VALID = [
    ("central", {"compressor": "identity"}),
    ("central", TOPK),
    ("central", {**TOPK, "granularity": "bucket"}),
    ("local", {**TOPK, "granularity": "bucket"}),
    ("shares", MASK),
    ("aggregate", MASK),
]


@pytest.mark.parametrize(("placement", "exchange"), VALID)
def test_no_alarm_where_nothing_is_wrong(placement: str, exchange: dict[str, Any]) -> None:
    audit = audit_configuration(configuration(placement=placement, exchange=exchange))
    assert isinstance(audit, Audit)
    assert not audit.violated
    assert [attack.outcome != "violation" for attack in audit.attacks] == [True, True]


def test_bounds_are_not_far_below_what_is_true() -> None:
    """An audit that proves nothing would never raise an alarm either."""
    found = audit_releases(Stages(configuration()))
    assert found.mu > 0.5 * found.claimed_mu
    assert found.sensitivity == pytest.approx(1.0, rel=1e-3)
    everything = {"sample_rate": 1.0, "noise_multiplier": 4.0, "steps": 20}
    training = audit_training(Stages(configuration(**everything)))
    assert training.found.epsilon > 0.2 * training.claimed_epsilon


def test_audits_of_what_is_correct_exceed_the_claim_as_rarely_as_they_say() -> None:
    """Of 15 audits at 80 % confidence three may; that 12 do has a probability of 1e-6."""
    stages = Stages(configuration(world_size=1))
    excess = 0
    for _ in range(15):
        found = audit_releases(stages, confidence=0.8)
        excess += exceeds(found)
        assert not is_alarm(found)
    assert excess < 12
