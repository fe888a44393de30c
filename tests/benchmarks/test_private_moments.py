"""The study of second moments: measured and theoretical figures agree, and would not otherwise."""

import math
from typing import Any

import pytest
import torch

from benchmarks.studies.private_moments import measure
from benchmarks.studies.private_moments.measure import (
    Row,
    Setup,
    effective_steps,
    quartiles,
    simulate,
    steps_by_floor,
)
from comm_hooks.optim.private import GaussianMechanism, Released
from tests.benchmarks.studying import nothing

SETUP = Setup(
    coordinates=20_000,
    strengths=(0.0, 0.1, 1.0),
    noise_multiplier=0.4,
    max_grad_norm=0.1,
    batch=256,
    beta2=0.95,
    seed=0,
)


def rows(setup: Setup = SETUP, due: tuple[int, ...] = (10, 150)) -> list[Row]:
    return simulate(setup, due, nothing)[0]


def is_as_in_theory(row: Row) -> bool:
    """Whether means and spreads are, the latter within the 3 % that 20,000 coordinates allow."""
    tolerance = 5 * row.error_theory / math.sqrt(SETUP.coordinates)
    return (
        abs(row.bias) < tolerance
        and abs(row.v_hat - 1 - row.strength) < tolerance
        and abs(row.spread / row.theory - 1) < 0.03
        and abs(row.error / row.error_theory - 1) < 0.03
    )


def test_moments_concentrate_as_in_theory() -> None:
    measured = rows()
    assert [(row.step, row.strength) for row in measured] == [
        (step, strength) for step in (10, 150) for strength in SETUP.strengths
    ]
    assert all(is_as_in_theory(row) for row in measured)
    # Proposition 3 holds where gradients are small beside the noise, with room to spare.
    for row in measured[:2] + measured[3:5]:
        assert row.beyond < measure.ALPHA
        assert row.quantile < row.bound
    # Coordinates of noise alone are at the floor.
    assert measured[3].floored > 0.95 > measured[5].floored


def test_formula_of_effective_steps() -> None:
    # One step is one gradient; without decay of the past, t steps are t gradients.
    assert effective_steps(0.999, 1) == pytest.approx(1)
    assert effective_steps(0.999999, 100) == pytest.approx(100, rel=1e-3)
    assert effective_steps(0.999, 10**6) == pytest.approx(1999)


def test_other_noise_than_the_optimizer_was_told_shows(monkeypatch: pytest.MonkeyPatch) -> None:
    release = GaussianMechanism.release

    def scaled(self: GaussianMechanism, sums: Any) -> Released:
        before = {name: tensor.clone() for name, tensor in sums.items()}
        released = release(self, sums)
        noised = {
            name: (before[name] / 256).lerp(tensor, 0.96)
            for name, tensor in released.tensors.items()
        }
        return Released(noised, released.noise_variance)

    monkeypatch.setattr(GaussianMechanism, "release", scaled)
    assert not any(is_as_in_theory(row) for row in rows(due=(150,)))


def test_lengths_of_steps() -> None:
    shape = (1, 50_000)
    clean = torch.full(shape, 4.0, dtype=torch.float64)
    first = torch.randn(shape, dtype=torch.float64)
    moments = measure.Moments(100, first, torch.full_like(clean, 1.01), first, clean)
    lengths = {each.gamma: each.lengths[0] for each in steps_by_floor(moments)}
    assert lengths[0.004] == pytest.approx(1 / math.sqrt(0.01), rel=0.03)
    assert lengths[0.84] == pytest.approx(1 / math.sqrt(0.84), rel=0.03)
    assert lengths[None] == pytest.approx(1 / 2, rel=0.03)


def test_quartiles_are_those_of_normal_noise_and_of_the_papers_table() -> None:
    _, moments = simulate(SETUP, (150,), nothing)
    found = {each.quantity: each for each in quartiles(SETUP, moments) if not each.strength}
    phi, quarter = SETUP.noise_variance, 0.6745
    spread = math.sqrt(2 / effective_steps(SETUP.beta2, 150))
    v = found["v, noised"]
    assert (v.upper - v.lower) / (2 * quarter * phi * spread) == pytest.approx(1, abs=0.05)
    # Table 2 prints the quartiles of DP-Adam's step as +-0.155.
    step = found["step, DP-Adam"]
    assert (-step.lower, step.upper) == pytest.approx((0.155, 0.155), abs=0.01)
    assert found["v, corrected"].lower == pytest.approx(measure.PAPERS_GAMMA * phi)
    corrected = found["step, DP-AdamBC"]
    assert corrected.upper > 3 * step.upper
    assert found["m, clean"].mean == found["v, clean"].mean == 0
