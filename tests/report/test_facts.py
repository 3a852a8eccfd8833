"""Reading evidence of any shape."""

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from leadline.report.facts import Facts

JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner),
    max_leaves=12,
)


@given(value=JSON, key=st.text(max_size=4))
@settings(max_examples=80, deadline=None)
def test_facts_of_any_json_answer_without_raising(value: Any, key: str) -> None:
    for facts in (Facts(value), Facts({key: value}).at(key)):
        number = facts.number()
        assert number is None or abs(number) < float("inf")
        assert isinstance(facts.text(), str)
        assert facts.integer() is None or isinstance(facts.integer(), int)
        assert all(isinstance(item, Facts) for item in facts.items())
        assert [name for name, _ in facts.pairs()] == sorted(name for name, _ in facts.pairs())


@pytest.mark.parametrize("value", [float("nan"), float("inf"), "nan", "-inf", True, None, [1], "x"])
def test_number_of_what_is_no_finite_number_is_absent(value: object) -> None:
    assert Facts({"a": value}).number("a") is None


@pytest.mark.parametrize(("value", "wanted"), [(3, 3.0), ("0.75", 0.75), (-2.5, -2.5)])
def test_number_reads_numbers_and_decimal_strings(value: object, wanted: float) -> None:
    assert Facts({"a": {"b": value}}).number("a", "b") == wanted


def test_integer_beyond_float_precision_stays_exact() -> None:
    assert Facts(2**60 + 1).integer() == 2**60 + 1


def test_series_keeps_the_place_of_a_missing_value() -> None:
    assert Facts([1.5, None, float("nan"), 2]).series() == [1.5, None, None, 2.0]
