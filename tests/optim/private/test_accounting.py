"""Epsilon against integrals, closed forms, exact values and other libraries."""

import math
import sys

import mpmath
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.optimize import brentq
from scipy.special import log_ndtr

from comm_hooks.optim.private.accounting import (
    DEFAULT_ORDERS,
    OPACUS_ORDERS,
    GaussianEvent,
    PLDAccountant,
    RDPAccountant,
    build_accountant,
)
from comm_hooks.optim.private.accounting.renyi import renyi_divergences
from tests.optim.scenarios import rarely

SETTINGS = [(0.3, 0.05), (0.5, 0.5), (1.0, 0.01), (2.0, 0.9), (5.0, 4096 / 45000), (30.0, 1e-3)]
ORDERS = (1.1, 1.5, 2.0, 2.3, 7.7, 10.9, 12.0, 63.0)

noise = st.floats(0.05, 50)
rates = st.floats(1e-4, 1)
deltas = st.floats(1e-9, 0.1)
events = st.builds(GaussianEvent, noise, rates, st.integers(1, 10_000))


def moment(sigma, q, order, power):
    """Log E_{z ~ P} [(Q(z) / P(z))^power] by brute force, in 30 digits: nothing of ours in it."""
    with mpmath.workdps(30):
        sigma, q = mpmath.mpf(sigma), mpmath.mpf(q)

        def integrand(z):
            ratio = (1 - q) + q * mpmath.exp((2 * z - 1) / (2 * sigma**2))
            return mpmath.npdf(z, 0, sigma) * ratio**power

        reach = 15 * sigma
        cuts = {-reach, -order - reach, mpmath.mpf(0), mpmath.mpf(order), order + reach}
        cuts |= {sigma**2 * mpmath.log(1 / q - 1) + 0.5} if q < 1 else set()
        cuts |= {order * mpmath.mpf(part) / 8 for part in range(1, 8)}
        return float(mpmath.log(mpmath.quad(integrand, sorted(cuts))))


@pytest.mark.slow
@pytest.mark.parametrize(("sigma", "q"), SETTINGS)
def test_divergences_are_those_of_a_brute_force_integral(sigma, q):
    ours = renyi_divergences(sigma, q, ORDERS)
    reference = [moment(sigma, q, order, order) / (order - 1) for order in ORDERS]
    np.testing.assert_allclose(ours, reference, rtol=1e-9, atol=2e-13)
    # Bounds: never below, but for what a product of rounded numbers leaves.
    assert np.all(ours >= np.array(reference) * (1 - 1e-12))


@pytest.mark.slow
@settings(max_examples=15, deadline=None)
@given(st.floats(0.1, 20), st.floats(1e-5, 0.999), st.floats(1.05, 40))
def test_divergences_are_those_of_the_integral_anywhere(sigma, q, order):
    (ours,) = renyi_divergences(sigma, q, (order,))
    reference = moment(sigma, q, order, order) / (order - 1)
    assert ours == pytest.approx(reference, rel=1e-8, abs=1e-12)


@pytest.mark.parametrize(("sigma", "q"), SETTINGS[1:3])
def test_the_opposite_direction_costs_no_more(sigma, q):
    # D(P || Q) is log E_P [(Q / P)^(1 - a)] / (a - 1): removing a sample instead of adding it.
    for order in (1.5, 2.0, 7.7):
        opposite = moment(sigma, q, order, 1 - order) / (order - 1)
        assert opposite <= renyi_divergences(sigma, q, (order,))[0] + 1e-13


@settings(max_examples=20, deadline=None)
@given(st.floats(0.02, 100), st.floats(1e-6, 0.999999), st.integers(2, 300))
def test_whole_orders_follow_the_closed_form(sigma, q, order):
    (ours,) = renyi_divergences(sigma, q, (float(order),))
    with mpmath.workdps(60):
        p, s = mpmath.mpf(q), mpmath.mpf(sigma)
        total = sum(
            mpmath.binomial(order, k)
            * (1 - p) ** (order - k)
            * p**k
            * mpmath.exp(mpmath.mpf(k * (k - 1)) / (2 * s**2))
            for k in range(order + 1)
        )
        reference = float(mpmath.log(total) / (order - 1))
    # Relative: also where the loss of a step is 1e-14.
    assert ours == pytest.approx(reference, rel=1e-8, abs=0)


def test_the_bounds_used_for_little_noise_are_upper_bounds():
    (ours,) = renyi_divergences(0.09, 0.5, (1.3,))
    exact = moment(0.09, 0.5, 1.3, 1.3) / 0.3
    assert exact <= ours <= 1.25 * exact


def test_steps_that_cost_next_to_nothing_are_not_free():
    assert np.all(renyi_divergences(1e3, 1e-6, DEFAULT_ORDERS) > 0)
    assert np.all(renyi_divergences(1e9, 0.5, DEFAULT_ORDERS) > 0)


def test_without_sampling_and_without_anybody():
    np.testing.assert_allclose(renyi_divergences(2.0, 1.0, (3.0, 8.0)), [0.375, 1.0])
    np.testing.assert_allclose(renyi_divergences(2.0, 1 - 1e-12, (3.0, 8.5)), [0.375, 8.5 / 8])
    assert RDPAccountant().epsilon([GaussianEvent(1.0, 0.0, 100)], 1e-5) == 0
    alone = [GaussianEvent(1.0, 0.1, 7)]
    assert RDPAccountant().epsilon([*alone, GaussianEvent(0.1, 0.0, 9)], 1e-5) == pytest.approx(
        RDPAccountant().epsilon(alone, 1e-5)
    )


def test_hardly_any_noise_costs_infinity():
    assert RDPAccountant().epsilon([GaussianEvent(1e-300, 0.1)], 1e-5) == math.inf
    assert 1e6 < RDPAccountant().epsilon([GaussianEvent(1e-3, 0.1, 10)], 1e-5) < math.inf


def test_divergences_cannot_be_changed_in_the_cache():
    with pytest.raises(ValueError, match="read-only"):
        renyi_divergences(1.0, 0.1, DEFAULT_ORDERS)[0] = 0


def gaussian_delta(epsilon, sigma, steps):
    """Delta of steps of the Gaussian mechanism without sampling (Balle & Wang, ICML 2018)."""
    with mpmath.workdps(30):
        mu = mpmath.sqrt(steps) / sigma
        return mpmath.ncdf(mu / 2 - epsilon / mu) - mpmath.exp(epsilon) * mpmath.ncdf(
            -mu / 2 - epsilon / mu
        )


@settings(max_examples=20, deadline=None)
@given(st.floats(0.3, 30), st.integers(1, 100), deltas)
def test_the_conversion_holds_for_the_gaussian_mechanism(sigma, steps, delta):
    epsilon = RDPAccountant().epsilon([GaussianEvent(sigma, 1.0, steps)], delta)
    assert gaussian_delta(epsilon, sigma, steps) <= delta * (1 + 1e-9)


@pytest.mark.parametrize("sigma", [0.5, 1.0, 4.0])
@pytest.mark.parametrize("q", [0.01, 0.3])
def test_the_bound_holds_for_one_sampled_step(sigma, q):
    delta = 1e-4
    epsilon = RDPAccountant().epsilon([GaussianEvent(sigma, q)], delta)
    z = np.linspace(-20 * sigma, 1 + 20 * sigma, 400_001)
    without = np.exp(-(z**2) / (2 * sigma**2)) / (sigma * math.sqrt(2 * math.pi))
    shifted = np.exp(-((z - 1) ** 2) / (2 * sigma**2)) / (sigma * math.sqrt(2 * math.pi))
    sampled = (1 - q) * without + q * shifted
    for one, other in [(without, sampled), (sampled, without)]:
        exact = np.maximum(one - math.exp(epsilon) * other, 0).sum() * (z[1] - z[0])
        assert exact <= delta


def test_the_conversion_at_one_order():
    history, delta = [GaussianEvent(2.0, 1.0, 4)], 1e-5
    divergence = 4 * 8 / (2 * 2.0**2)
    balle = RDPAccountant(orders=[8]).epsilon(history, delta)
    assert balle == pytest.approx(
        divergence + math.log(7 / 8) - (math.log(delta) + math.log(8)) / 7
    )


def test_orders():
    assert OPACUS_ORDERS[:2] == (1.1, 1.2)
    assert OPACUS_ORDERS[98:100] == (10.9, 12.0)
    assert OPACUS_ORDERS[-1] == 63
    assert DEFAULT_ORDERS[: len(OPACUS_ORDERS)] == OPACUS_ORDERS
    assert DEFAULT_ORDERS[len(OPACUS_ORDERS) :] == (128, 256, 512, 1024)
    # With 63 as the largest order a negligible loss would cost a tenth.
    nothing = [GaussianEvent(100.0, 1e-4)]
    assert RDPAccountant(orders=OPACUS_ORDERS).epsilon(nothing, 1e-5) > 0.09
    assert RDPAccountant().epsilon(nothing, 1e-5) < 0.01
    assert RDPAccountant().epsilon([GaussianEvent(1e3, 0.001)], 0.5) == 0, "not negative"


def test_steps_with_different_noise_compose_like_one_gaussian():
    # Without sampling, precisions add up: 1 / 1.2^2 = 4 / 4^2 + 10 / 6^2 + ...
    history = [GaussianEvent(4.0, 1.0, 4), GaussianEvent(6.0, 1.0, 10), GaussianEvent(4.0, 1.0, 2)]
    together = [GaussianEvent((6 / 16 + 10 / 36) ** -0.5, 1.0)]
    accountant = RDPAccountant()
    assert accountant.epsilon(history, 1e-5) == pytest.approx(accountant.epsilon(together, 1e-5))


@settings(max_examples=20, deadline=None)
@given(st.lists(events, min_size=1, max_size=5), deltas, st.randoms())
def test_how_a_history_is_cut_and_ordered_does_not_matter(history, delta, random):
    accountant = RDPAccountant()
    pieces = []
    for event in history:
        first = random.randint(0, event.steps)
        parts = [part for part in (first, event.steps - first) if part]
        pieces += [GaussianEvent(*event.mechanism, steps=part) for part in parts]
    expected = accountant.epsilon(history, delta)
    random.shuffle(pieces)
    assert accountant.epsilon(pieces, delta) == pytest.approx(expected, rel=1e-12)


@settings(max_examples=20, deadline=None)
@given(events, events, deltas, st.floats(1, 3))
def test_epsilon_grows_with_whatever_gives_more_away(event, other, delta, factor):
    accountant = RDPAccountant()
    sigma, q = event.mechanism
    epsilon = accountant.epsilon([event], delta)
    slack = 1e-9 * (1 + epsilon)
    for more in [
        [GaussianEvent(sigma, q, event.steps + 1)],
        [GaussianEvent(sigma / factor, q, event.steps)],
        [GaussianEvent(sigma, min(1.0, factor * q), event.steps)],
        [event, other],
    ]:
        assert accountant.epsilon(more, delta) >= epsilon - slack
    assert accountant.epsilon([event], delta / factor) >= epsilon - slack


def dp_accounting():
    return pytest.importorskip("dp_accounting", reason="dp-accounting is not installed")


def composed(library, accountant, history):
    for event in history:
        gaussian = library.GaussianDpEvent(event.noise_multiplier)
        sampled = library.PoissonSampledDpEvent(event.sample_rate, gaussian)
        accountant.compose(sampled, event.steps)
    return accountant


def test_dp_accounting_agrees_at_whole_orders():
    library = dp_accounting()
    orders = [order for order in DEFAULT_ORDERS if order == int(order)]
    history = [GaussianEvent(1.0, 0.01, 700), GaussianEvent(4.0, 0.3, 20)]
    theirs = composed(library, library.rdp.RdpAccountant(orders), history)
    ours = RDPAccountant(orders=orders).epsilon(history, 1e-5)
    assert ours == pytest.approx(theirs.get_epsilon(1e-5), rel=1e-9)
    # At fractional orders dp-accounting 0.6 adds up |binomials|: an upper bound of the integral.
    theirs = composed(library, library.rdp.RdpAccountant(list(DEFAULT_ORDERS)), history)
    assert RDPAccountant().epsilon(history, 1e-5) <= theirs.get_epsilon(1e-5) + 1e-9


def test_pld_is_dp_accountings():
    library = dp_accounting()
    history = [GaussianEvent(4.0, 0.05, 300), GaussianEvent(6.0, 1.0), GaussianEvent(1.0, 0.0, 5)]
    theirs = composed(library, library.pld.PLDAccountant(), history).get_epsilon(1e-5)
    ours = PLDAccountant().epsilon(history, 1e-5)
    assert ours == pytest.approx(theirs, rel=1e-6)
    assert 0.8 * RDPAccountant().epsilon(history, 1e-5) < ours
    assert ours < RDPAccountant().epsilon(history, 1e-5)


def test_pld_leaves_large_losses_to_rdp():
    dp_accounting()
    for history in ([GaussianEvent(0.001, 0.5, 10)], [GaussianEvent(0.5, 0.0)]):
        assert PLDAccountant().epsilon(history, 1e-5) == RDPAccountant().epsilon(history, 1e-5)


def test_pld_without_the_package(monkeypatch):
    monkeypatch.setitem(sys.modules, "dp_accounting", None)
    monkeypatch.setitem(sys.modules, "dp_accounting.pld", None)
    with pytest.raises(ImportError, match=r'pip install "comm-hooks\[dp\]"'):
        build_accountant("pld")


def test_accountants_by_name():
    assert isinstance(build_accountant("rdp"), RDPAccountant)
    own = RDPAccountant(orders=[2, 3])
    assert build_accountant(own) is own
    with pytest.raises(ValueError, match=r"unknown accountant 'gdp': .*known are rdp, pld"):
        build_accountant("gdp")


def test_events_hold_plain_numbers():
    event = GaussianEvent(1, np.float64(0.25), 3, "shares", 1, 0, "a run")
    kinds = [float, float, int, str, float, float, str]
    assert [type(value) for value in vars(event).values()] == kinds
    with pytest.raises(ValueError, match="run must be a str"):
        GaussianEvent(1.0, 0.25, run=3)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        *(
            (
                lambda n=n, v=v: GaussianEvent(
                    **{"noise_multiplier": 1.0, "sample_rate": 0.1, n: v}
                ),
                f"{n} must",
            )
            for n, values in {
                "noise_multiplier": [0.0, math.nan, math.inf, "1.0", True],
                "sample_rate": [-0.1, math.nan, None],
                "steps": [0, 1.5],
                "checkpoint_multiplier": [-0.1, 1.1, math.nan, "1"],
                "rank_multiplier": [-0.1, 1.1],
            }.items()
            for v in values
        ),
        *(
            (
                lambda d=d: RDPAccountant().epsilon([GaussianEvent(1.0, 0.1)], d),
                "at least 1e-12 .noise ends",
            )
            for d in (0, 1, -1e-5, math.nan, "1e-5", True, 9e-13, 1e-300)
        ),
        (lambda: RDPAccountant().epsilon([], 1e-5), "no step has been taken: nothing was released"),
        (lambda: RDPAccountant(orders=[]), "orders must be greater than 1"),
        (lambda: RDPAccountant(orders=[1.0]), "orders must be greater than 1"),
        (lambda: RDPAccountant(orders=[math.nan]), "orders must be greater than 1"),
    ],
)
def test_bad_arguments(call, message):
    with pytest.raises(ValueError, match=message):
        call()
    assert RDPAccountant().epsilon([GaussianEvent(1.0, 0.01, 10)], 1e-12) > 0


def exact_epsilon(mu, delta):
    """Epsilon of a normal number whose mean is 0 or mu (Balle & Wang, ICML 2018)."""

    def excess(epsilon):
        one = log_ndtr(mu / 2 - epsilon / mu)
        other = epsilon + log_ndtr(-mu / 2 - epsilon / mu)
        return one + math.log(max(1e-300, -math.expm1(other - one))) - math.log(delta)

    return brentq(excess, 0.0, 50.0)


@pytest.mark.parametrize("delta", [1e-5, 1e-8, 1e-10, 1e-12])
@pytest.mark.parametrize("steps", [1, 1000, *rarely(30, 10**5)])
@pytest.mark.parametrize("kind", [PLDAccountant, RDPAccountant])
def test_epsilon_is_an_upper_bound_of_the_exact_one(kind, steps, delta):
    for mu in (0.3, 1.0):
        exact, sigma = exact_epsilon(mu, delta), steps**0.5 / mu
        whole = [GaussianEvent(sigma, 1.0, steps)]
        parts = [GaussianEvent(2**0.5 * sigma, 1.0, steps), GaussianEvent(sigma, 1.0, steps)]
        parts.append(GaussianEvent(2**0.5 * sigma * 1.000001, 1.0, steps))
        assert exact - 1e-9 <= kind().epsilon(whole, delta) <= 1.1 * exact + 0.1
        assert exact_epsilon(2**0.5 * mu, delta) - 1e-4 <= kind().epsilon(parts, delta)
