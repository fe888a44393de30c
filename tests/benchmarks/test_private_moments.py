"""The study of second moments: measured and theoretical figures agree, and would not otherwise."""

import math
from typing import Any

import pytest

from benchmarks.studies.private_moments import measure
from benchmarks.studies.private_moments.measure import (
    Row,
    Setup,
    effective_steps,
    simulate,
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
    return list(simulate(setup, due, nothing))


def is_as_in_theory(row: Row) -> bool:
    """Whether means and spreads are, the latter within the 3 % that 20,000 coordinates allow."""
    tolerance = 5 * row.error_theory / math.sqrt(SETUP.coordinates)
    return (
        abs(row.bias) < tolerance
        and abs(row.v_hat - 1 - row.strength) < tolerance
        and abs(row.spread / row.theory - 1) < 0.03
        and abs(row.error / row.error_theory - 1) < 0.03
    )


@pytest.mark.slow
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
