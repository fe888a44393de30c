"""Rates as users write them."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.bench.rates import bits_per_second, parse_rates, show_bits, show_rate


@given(st.lists(st.integers(1, 10**5), min_size=1, max_size=6, unique=True), st.booleans())
def test_they_are_measured_unshaped_first_then_from_fast_to_slow(
    megabits: list[int], named: bool
) -> None:
    text = ", ".join([*(["none"] if named else []), *(f"{number}mbit" for number in megabits)])
    first, *rates = parse_rates(text)
    assert (first, bits_per_second(first)) == ("none", None)
    assert rates == [f"{number}mbit" for number in sorted(megabits, reverse=True)]
    assert [bits_per_second(rate) for rate in rates] == sorted(
        (1e6 * number for number in megabits), reverse=True
    )


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("100mbps", "'100mbps': write a number and a unit, such as 10mbit or 1gbit"),
        ("10mbit,", "'': write a number and a unit"),
        ("0mbit", "'0mbit': write a number and a unit"),
        ("fast", "'fast': write a number and a unit"),
        ("99kbit", "'99kbit' is below 100kbit"),
        ("1gbit,10mbit,1000mbit", r"'1000mbit' is named twice \(as '1gbit'\)"),
    ],
)
def test_others_are_refused(text: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        parse_rates(text)


def test_people_read_them_with_units() -> None:
    shown = [show_rate(rate) for rate in ("none", "100kbit", "10mbit", "2.5gbit")]
    assert shown == ["unshaped", "100 kbit/s", "10 Mbit/s", "2.5 Gbit/s"]
    assert show_bits(93_583_484.7) == "93.6 Mbit/s"
    assert show_bits(25e12) == "2.5e+04 Gbit/s"
