import pytest
from hypothesis import given
from hypothesis import strategies as st

from leadline.core.errors import DataError
from leadline.core.notes import Note, parse_note


@given(count=st.integers(0, 2**53 - 1), detail=st.text())
def test_note_comes_back_from_its_document(count, detail):
    note = Note(kind="document_skipped", count=count, detail=detail)
    assert parse_note({**note.document, "layer": 3}) == note


@pytest.mark.parametrize("kind", ["", "Two words", "9lives", "a" * 101])
def test_note_kind_that_is_no_slug_is_refused(kind):
    with pytest.raises(ValueError, match="lower-case"):
        Note(kind=kind, count=1, detail="")


def test_note_count_below_zero_is_refused():
    with pytest.raises(ValueError, match="counts -1"):
        Note(kind="a", count=-1, detail="")


@pytest.mark.parametrize(
    "change",
    [
        {"kind": 3},
        {"kind": "No"},
        {"count": "3"},
        {"count": True},
        {"count": -1},
        {"detail": None},
    ],
)
def test_parse_note_of_an_edited_document_is_refused(change):
    document = Note(kind="a", count=1, detail="x").document
    with pytest.raises(DataError, match="needs kind"):
        parse_note({**document, **change})


def test_note_reads_as_one_line():
    assert str(Note(kind="a_b", count=2, detail="x, y")) == "a_b (2): x, y"
