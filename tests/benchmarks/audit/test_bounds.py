"""Bounds against their definitions, and against exact results."""

import math
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.audit import epsilon_lower_bound, gaussian_lower_bound
from benchmarks.audit.attacks.bounds import (
    binomial_tail,
    error_rate_bound,
    gaussian_epsilon,
)


def exact_p_value(
    canaries: int, guesses: int, correct: int, right: Fraction, delta: float
) -> float:
    """Theorem 5.2, term by term, in fractions."""

    def tail(at_least: int) -> Fraction:
        return sum(
            (
                math.comb(guesses, w) * right**w * (1 - right) ** (guesses - w)
                for w in range(max(0, at_least), guesses + 1)
            ),
            Fraction(0),
        )

    beta = tail(correct)
    alpha = max(
        ((tail(correct - i) - beta) / i for i in range(1, canaries + 1)), default=Fraction(0)
    )
    return float(beta + 2 * canaries * Fraction(delta) * alpha)


@settings(max_examples=40, deadline=None)
@given(data=st.data())
def test_the_bound_is_where_the_theorem_stops_refuting(data: st.DataObject) -> None:
    canaries = data.draw(st.integers(1, 40))
    guesses = data.draw(st.integers(0, canaries))
    correct = data.draw(st.integers(0, guesses))
    delta = data.draw(st.sampled_from([0.0, 1e-5, 1e-3]))
    bound = epsilon_lower_bound(correct, guesses, canaries, delta, 0.9)

    def p_value(epsilon: float) -> float:
        right = Fraction(1 / (1 + math.exp(-epsilon)))
        return exact_p_value(canaries, guesses, correct, right, delta)

    assert p_value(bound + 1e-6) >= 0.1 * (1 - 1e-6)
    if bound:
        assert p_value(bound - 1e-6) < 0.1
        assert p_value(bound / 2) < 0.1


@pytest.mark.slow
def test_randomized_response_is_not_accused_more_often_than_agreed() -> None:
    """Right with probability e^epsilon / (1 + e^epsilon) is exactly epsilon-private."""
    epsilon, canaries, runs = 1.0, 200, 2000
    right = 1 / (1 + math.exp(-epsilon))
    correct = np.random.default_rng(7).binomial(canaries, right, size=runs)
    bounds = [epsilon_lower_bound(int(c), canaries, canaries, 0.0, 0.9) for c in correct]
    excess = sum(bound > epsilon for bound in bounds)
    assert binomial_tail(excess, runs, 0.1) > 1e-6
    # Nor is it far below: the median of 200 guesses proves most of epsilon.
    assert sorted(bounds)[runs // 2] > 0.7


def test_a_gaussian_is_not_accused_more_often_than_agreed() -> None:
    mu, trials, runs = 1.0, 300, 2000
    rng = np.random.default_rng(8)
    wrong = 0.5 * math.erfc(mu / 2 / math.sqrt(2))
    bounds = [
        gaussian_lower_bound(int(p), trials, int(n), trials, 0.9)
        for p, n in rng.binomial(trials, wrong, size=(runs, 2))
    ]
    assert binomial_tail(sum(bound > mu for bound in bounds), runs, 0.1) > 1e-6
    assert sorted(bounds)[runs // 2] > 0.7


def test_the_rate_of_errors_is_bounded_as_clopper_and_pearson_do() -> None:
    assert error_rate_bound(0, 50, 0.95) == pytest.approx(1 - 0.05 ** (1 / 50))
    assert error_rate_bound(50, 50, 0.95) == 1
    limit = error_rate_bound(7, 50, 0.95)
    assert 1 - binomial_tail(8, 50, limit) == pytest.approx(0.05)


@pytest.mark.parametrize("mu", [0.3, 1.0, 4.0])
def test_epsilon_of_a_gaussian_solves_its_equation(mu: float) -> None:
    def cdf(x: float) -> float:
        return math.erfc(-x / math.sqrt(2)) / 2

    epsilon = gaussian_epsilon(mu, 1e-5)
    delta = cdf(mu / 2 - epsilon / mu) - math.exp(epsilon) * cdf(-mu / 2 - epsilon / mu)
    assert delta == pytest.approx(1e-5, rel=1e-6)
    assert gaussian_epsilon(0.0, 1e-5) == 0


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((3, 2, 5, 1e-5), "need 0 <= correct <= guesses <= canaries"),
        ((1, 6, 5, 1e-5), "need 0 <= correct <= guesses <= canaries"),
        ((1, 2, 5, 1.0), r"delta must be in \[0, 1\)"),
        ((1, 2, 5, 1e-5, 1.0), "confidence must be between 0 and 1"),
    ],
)
def test_numbers_out_of_range(arguments: tuple[float, ...], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        epsilon_lower_bound(*arguments)  # type: ignore[arg-type]
