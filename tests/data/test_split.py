"""The held-out draw: by content and seed alone, never empty on either side."""

from fractions import Fraction

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from leadline.core.errors import DataError, UsageError
from leadline.data.split import assign_splits, parse_eval_fraction

CONTENTS = st.lists(st.text("abcdef", min_size=1, max_size=3), min_size=2).filter(
    lambda items: len(set(items)) > 1
)
FRACTIONS = st.fractions(min_value=Fraction(1, 1000), max_value=Fraction(999, 1000))


@settings(max_examples=60, deadline=None)
@given(contents=CONTENTS, seed=st.integers(0, 50), fraction=FRACTIONS)
def test_split_leaves_no_side_empty_and_keeps_duplicates_together(
    contents: list[str], seed: int, fraction: Fraction
) -> None:
    splits = assign_splits(contents, seed=seed, eval_fraction=fraction)
    assert set(splits) == {"train", "eval"}
    sides = {content: set() for content in contents}  # type: dict[str, set[str]]
    for content, split in zip(contents, splits, strict=True):
        sides[content].add(split)
    assert all(len(side) == 1 for side in sides.values())


@pytest.mark.parametrize("fraction", ["0.001", "0.999"])
def test_split_of_two_documents_at_an_extreme_fraction_fills_both_sides(fraction: str) -> None:
    for seed in range(20):
        splits = assign_splits(["a", "b"], seed=seed, eval_fraction=Fraction(fraction))
        assert set(splits) == {"train", "eval"}


def test_split_holds_out_about_the_fraction_asked() -> None:
    contents = [str(number) for number in range(20_000)]
    splits = assign_splits(contents, seed=3, eval_fraction=Fraction("0.05"))
    assert 850 < splits.count("eval") < 1150


def test_split_of_a_document_ignores_the_other_documents() -> None:
    contents = [str(number) for number in range(500)]
    fraction = Fraction("0.1")
    all_of_them = assign_splits(contents, seed=1, eval_fraction=fraction)
    assert assign_splits(contents[:400], seed=1, eval_fraction=fraction) == all_of_them[:400]


def test_split_changes_with_the_seed() -> None:
    contents = [str(number) for number in range(500)]
    draws = {tuple(assign_splits(contents, seed=s, eval_fraction=Fraction(1, 4))) for s in range(9)}
    assert len(draws) == 9


def test_split_of_equal_documents_is_refused() -> None:
    with pytest.raises(DataError, match=r"3 document\(s\) but 1 distinct"):
        assign_splits(["a", "a", "a"], seed=0, eval_fraction=Fraction(1, 2))


@pytest.mark.parametrize("text", ["0", "1", "0.0", "1.0", "-0.1", "1.5", "NaN", "Infinity"])
def test_eval_fraction_outside_its_range_is_refused(text: str) -> None:
    with pytest.raises(UsageError, match=f"eval fraction {text}"):
        parse_eval_fraction(text)


@pytest.mark.parametrize("text", ["", "two", "2%", "0,02"])
def test_eval_fraction_that_is_no_number_is_refused(text: str) -> None:
    with pytest.raises(UsageError, match="not a number"):
        parse_eval_fraction(text)


@pytest.mark.parametrize("text", ["0.02", "0.020", ".02", "2e-2"])
def test_eval_fraction_spellings_are_one_number(text: str) -> None:
    assert parse_eval_fraction(text) == (Fraction(1, 50), "0.02")
