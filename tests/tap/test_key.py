from dataclasses import fields, replace

import pytest

from leadline.core.errors import DataError
from leadline.tap.key import GENERATION, TapKey, first_difference, parse_key

from .taps import toy_key

NAMES = [field.name for field in fields(TapKey)]
TEXT = {name for name in NAMES if isinstance(getattr(toy_key(), name), str)}


def changed(key: TapKey, name: str) -> TapKey:
    return replace(key, **{name: "other" if name in TEXT else 77})


@pytest.mark.parametrize("name", NAMES)
def test_first_difference_names_each_field_and_both_values(name):
    differs = first_difference(toy_key(), changed(toy_key(), name), besides=frozenset())
    assert differs is not None
    assert (differs.field, differs.left) == (name, getattr(toy_key(), name))
    assert differs.right in ("other", 77)


@pytest.mark.parametrize("name", NAMES)
def test_digest_of_a_key_changes_with_each_field(name):
    assert changed(toy_key(), name).digest != toy_key().digest


def test_first_difference_of_equal_keys_is_none():
    assert first_difference(toy_key(), toy_key(), besides=frozenset()) is None


def test_first_difference_besides_a_field_looks_past_it():
    other = toy_key(tokens=41, dtype="bfloat16")
    differs = first_difference(toy_key(), other, besides=frozenset({"tokens"}))
    assert differs is not None
    assert differs.field == "dtype"


def test_key_comes_back_from_its_document():
    key = toy_key(max_document_tokens=9, first_expert=0, end_expert=4)
    assert parse_key(key.document) == key
    assert parse_key(toy_key().document).generation == GENERATION


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"tokens": "40"}, "tokens is '40', wanted int"),
        ({"tokens": True}, "tokens is True"),
        ({"tokens": -1}, "wanted 0 or more"),
        ({"tokens": None}, "tokens is None"),
        ({"dtype": 4}, "dtype is 4, wanted str"),
        ({"surprise": 1}, "surprise"),
    ],
)
def test_parse_key_of_an_edited_document_is_refused(change, message):
    with pytest.raises(DataError, match=message):
        parse_key({**toy_key().document, **change})


def test_parse_key_without_a_field_names_it():
    document = toy_key().document
    del document["schedule"]
    with pytest.raises(DataError, match="schedule"):
        parse_key(document)
