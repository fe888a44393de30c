"""Learning rates rise to 1 in the warm-up and fall to nearly nothing at the end."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.lab.schedules import SCHEDULES, cosine, warmed_up


@given(name=st.sampled_from(sorted(SCHEDULES)), warmup=st.integers(1, 50), rest=st.integers(0, 200))
def test_factors_rise_in_the_warm_up_and_never_after(name: str, warmup: int, rest: int) -> None:
    factor = warmed_up(SCHEDULES[name], warmup, warmup + rest)
    values = [factor(done) for done in range(warmup + rest)]
    assert values[:warmup] == sorted(values[:warmup])
    assert values[warmup - 1] == 1
    assert values[warmup:] == sorted(values[warmup:], reverse=True)
    assert all(0 < value <= 1 for value in values)


@pytest.mark.parametrize(("progress", "expected"), [(0.0, 1.0), (0.5, 0.5005), (1.0, 0.001)])
def test_the_cosine_ends_at_a_thousandth(progress: float, expected: float) -> None:
    assert cosine(progress) == pytest.approx(expected)
