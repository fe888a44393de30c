"""The noise that a budget needs and the steps it lasts: on the right side, and no further."""

import math

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from comm_hooks.optim.private.accounting import (
    Accountant,
    GaussianEvent,
    RDPAccountant,
    max_steps,
    noise_multiplier_for,
)

targets = st.floats(0.05, 60)
deltas = st.floats(1e-8, 1e-2)
rates = st.sampled_from([1e-3, 0.01, 0.2, 1.0])
SPENT = [GaussianEvent(2.0, 0.01, 300), GaussianEvent(0.9, 0.02, 50)]


@settings(max_examples=10, deadline=None)
@given(targets, deltas, rates, st.integers(1, 10**5), st.sampled_from([(), tuple(SPENT)]))
def test_noise_keeps_the_budget_and_hardly_less_would(target, delta, rate, steps, spent):
    accountant = RDPAccountant()
    assume(not spent or accountant.epsilon(spent, delta) < 0.9 * target)
    sigma = noise_multiplier_for(target, delta, sample_rate=rate, steps=steps, spent=spent)

    def epsilon(noise_multiplier):
        return accountant.epsilon([*spent, GaussianEvent(noise_multiplier, rate, steps)], delta)

    assert epsilon(sigma) <= target < epsilon(sigma / 1.00011)


def test_the_noise_of_table_8_comes_back():
    sigma = noise_multiplier_for(8.0, 1e-5, sample_rate=4096 / 45000, steps=7227)
    assert 4.9990 < sigma < 5.0006


@pytest.mark.slow
def test_noise_for_pld_is_less():
    pytest.importorskip("dp_accounting", reason="dp-accounting is not installed")
    asked = {"sample_rate": 0.05, "steps": 400}
    by_rdp = noise_multiplier_for(2.0, 1e-5, **asked)
    by_pld = noise_multiplier_for(2.0, 1e-5, accountant="pld", **asked)
    assert 0.85 * by_rdp < by_pld < 0.99 * by_rdp


def test_few_histories_are_accounted_for():
    class Counting(RDPAccountant):
        calls = 0

        def _epsilon(self, *arguments):
            self.calls += 1
            return super()._epsilon(*arguments)

    accountant = Counting()
    noise_multiplier_for(8.0, 1e-5, sample_rate=0.01, steps=10_000, accountant=accountant)
    assert accountant.calls <= 10  # PLD takes seconds for each


def test_a_target_below_what_delta_costs():
    with pytest.raises(
        ValueError, match=r"0\.001 cannot be reached.*however much noise is added, R"
    ):
        noise_multiplier_for(0.001, 1e-5, sample_rate=0.1, steps=10)
    with pytest.raises(ValueError, match="after what was spent before"):
        noise_multiplier_for(0.5, 1e-5, sample_rate=0.1, steps=10, spent=SPENT)


@settings(max_examples=20, deadline=None)
@given(targets, deltas, st.floats(0.3, 20), rates, st.sampled_from([(), tuple(SPENT)]))
def test_the_last_step_within_the_budget(target, delta, sigma, rate, spent):
    accountant = RDPAccountant()
    steps = max_steps(target, delta, noise_multiplier=sigma, sample_rate=rate, spent=spent)

    def epsilon(count):
        events = [*spent, GaussianEvent(sigma, rate, count)] if count else [*spent]
        return accountant.epsilon(events, delta)

    assert epsilon(steps + 1) > target
    if steps:
        assert epsilon(steps) <= target


def test_a_target_that_is_met_exactly_counts_as_kept():
    history = [GaussianEvent(2.0, 0.01, 1234)]
    target = RDPAccountant().epsilon(history, 1e-5)
    assert max_steps(target, 1e-5, noise_multiplier=2.0, sample_rate=0.01) == 1234
    assert max_steps(0.5, 1e-5, noise_multiplier=0.3, sample_rate=0.5) == 0
    assert max_steps(0.5, 1e-5, noise_multiplier=50.0, sample_rate=0.01, spent=SPENT) == 0


@pytest.mark.parametrize("answer", [0, 1, 40, 12345])
def test_no_training_much_longer_than_the_answer_is_accounted(answer):
    class Counting(Accountant):
        longest = 0

        def _epsilon(self, steps, delta):
            self.longest = max(self.longest, steps.total())
            return float(steps.total())

    accountant = Counting()
    options = {"noise_multiplier": 1.0, "sample_rate": 0.5, "accountant": accountant}
    assert max_steps(answer + 0.5, 1e-5, **options) == answer
    assert accountant.longest <= 2 * answer + 1  # PLD takes seconds for long ones


def test_accountants_of_ones_own():
    class PerStep(Accountant):
        def _epsilon(self, steps, delta):
            return sum(count / sigma for (sigma, _), count in steps.items())

    own = {"accountant": PerStep(), "sample_rate": 0.5}
    assert max_steps(10.0, 1e-5, noise_multiplier=4.0, **own) == 40
    assert noise_multiplier_for(10.0, 1e-5, steps=40, **own) == pytest.approx(4.0, rel=1e-4)


ASKED = {"target_epsilon": 1.0, "target_delta": 1e-5, "sample_rate": 0.1}
TARGET = r"target_epsilon must lie in \(0, inf\)"


@pytest.mark.parametrize(
    ("function", "changed", "message"),
    [
        *((f, {"target_epsilon": t}, TARGET) for f in "ns" for t in (0, math.nan, math.inf, "8")),
        *((f, {"target_delta": 1.0}, "target_delta must be at least 1e-12") for f in "ns"),
        *((f, {"sample_rate": 0.0}, r"sample_rate must lie in \(0, 1\]") for f in "ns"),
        *((f, {"accountant": "prv"}, "unknown accountant 'prv'") for f in "ns"),
        ("s", {"noise_multiplier": 0.0}, r"noise_multiplier must lie in \(0, inf\)"),
        (
            "s",
            {"noise_multiplier": 100.0, "sample_rate": 1e-9},
            r"lasts for more than 1e\+15 steps",
        ),
        ("n", {"steps": 0}, "steps must be an integer of at least 1"),
    ],
    ids=str,
)
def test_values_out_of_range(function, changed, message):
    calibrate, usual = {
        "s": (max_steps, {"noise_multiplier": 1.0}),
        "n": (noise_multiplier_for, {"steps": 1}),
    }[function]
    with pytest.raises(ValueError, match=message):
        calibrate(**{**ASKED, **usual, **changed})
