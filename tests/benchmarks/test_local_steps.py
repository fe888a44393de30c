"""The study of local steps: what the same loss costs."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.studies.local_steps.equal_loss import default_target, needed
from comm_hooks.launchers.lab.outcomes import Point
from tests.benchmarks.studying import outcome_of, straight


@given(slope=st.floats(0.05, 0.4), target=st.floats(0.5, 5.5))
def test_what_a_loss_needs_lies_on_the_line(slope: float, target: float) -> None:
    found = needed(straight(slope), target)
    exact = (5 - target) / slope
    if exact > 10:
        assert found is None or exact == pytest.approx(10)
    else:
        assert found is not None
        steps, sent = found
        assert steps == pytest.approx(max(1, exact))
        assert sent == pytest.approx(100 * max(1, exact))


def test_the_first_crossing_counts() -> None:
    losses = [4.0, 3.0, 3.5, 2.0]
    curve = [Point(i, loss, 0.5, 10 * i) for i, loss in enumerate(losses)]
    assert needed(curve, 3.25) == (0.75, 7.5)


def test_the_target_is_what_all_reduce_had_after_three_quarters() -> None:
    others = outcome_of("top-k deltas", straight(0.4))
    assert default_target([others]) is None
    losses = [4.0, 3.0, 2.0, 1.5, 1.4]
    curve = [Point(4 * i, loss, 0.5, i) for i, loss in enumerate(losses, start=1)]
    all_reduce = outcome_of("all_reduce", curve)
    # Step 15 of 20 lies three quarters of the way from step 12 to step 16.
    assert default_target([others, all_reduce]) == pytest.approx(1.625)
