"""Numbers as the page prints them."""

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from leadline.report import numerals


@pytest.mark.parametrize(
    "show",
    [
        numerals.count,
        numerals.rate,
        numerals.size,
        numerals.decimal,
        numerals.scientific,
        numerals.percent,
        numerals.seconds,
    ],
)
def test_figure_that_is_absent_prints_as_a_dash(show) -> None:
    assert show(None) == "-"


@pytest.mark.parametrize(
    ("value", "wanted"),
    [
        (0.0173, "17.3 ms"),
        (1.94, "1.9 s"),
        (119.9, "119.9 s"),
        (600, "10.0 min"),
        (28_800, "8.0 h"),
    ],
)
def test_seconds_choose_a_readable_unit(value: float, wanted: str) -> None:
    assert numerals.seconds(value).replace("\N{NO-BREAK SPACE}", " ") == wanted


def test_rate_is_whole_above_a_hundred_and_exact_below() -> None:
    assert numerals.rate(478_000.4) == "478,000"
    assert numerals.rate(93.26) == "93.3"


@given(
    low=st.floats(-1e6, 1e6),
    span=st.floats(1e-6, 1e9),
    about=st.integers(2, 9),
)
@settings(max_examples=100, deadline=None)
def test_ticks_rise_inside_the_range_and_are_not_too_many(
    low: float, span: float, about: int
) -> None:
    high = low + span
    assume(span > 1e-9 * abs(low))  # below this the values of an axis are rounding themselves
    values = numerals.ticks(low, high, about)
    slack = (high - low) * 1e-6
    assert values == sorted(values)
    assert all(low - slack <= value <= high + slack for value in values)
    assert len(values) <= about + 2


def test_ticks_of_an_empty_range_are_its_one_value() -> None:
    assert numerals.ticks(3.0, 3.0) == [3.0]
