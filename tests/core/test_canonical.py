import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from leadline.core.canonical import (
    canonical_bytes,
    parse_canonical,
    sha256_bytes,
    sha256_file,
    sha256_json,
)
from leadline.core.errors import IntegrityError, UsageError

_SAFE = 2**53 - 1
_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-_SAFE, _SAFE) | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=5), inner),
    max_leaves=12,
)


def test_canonical_bytes_of_an_object_sorts_keys_and_drops_blanks():
    assert canonical_bytes({"b": [1, True, None], "a": "\u20ac"}) == (
        b'{"a":"\xe2\x82\xac","b":[1,true,null]}'
    )


def test_canonical_bytes_of_keys_beyond_the_basic_plane_sorts_by_utf16():
    # RFC 8785 section 3.2.3: U+1F600 sorts before U+FB33, because its surrogate does.
    assert list(json.loads(canonical_bytes({"\ufb33": 1, "\U0001f600": 2}))) == [
        "\U0001f600",
        "\ufb33",
    ]


@given(_VALUES)
@settings(max_examples=60, deadline=None)
def test_parse_canonical_of_canonical_bytes_returns_the_value(value):
    assert parse_canonical(canonical_bytes(value)) == value


@pytest.mark.parametrize(
    ("value", "named"),
    [
        ({"a": [1, 0.5]}, "$.a[1] holds the float 0.5"),
        ({"a": 2**53}, "2**53 - 1"),
        ({"a": -(2**53)}, "2**53 - 1"),
        ({"a": 10**5000}, "2**53 - 1"),
        ({1: "a"}, "the key 1"),
        ({"a": {1, 2}}, "a set"),
        ({"a": b"x"}, "a bytes"),
        ({"a": "\ud800"}, r"'\ud800'"),
        ({"\udfff": 1}, r"'\udfff'"),
    ],
)
def test_canonical_bytes_of_a_value_two_readers_may_differ_on_is_refused(value, named):
    with pytest.raises(UsageError) as caught:
        canonical_bytes(value)
    assert named in str(caught.value)


def test_canonical_bytes_of_endless_nesting_is_refused_in_words():
    value: list = []
    value.append(value)
    with pytest.raises(UsageError, match="nested deeper than 64"):
        canonical_bytes(value)


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"{",
        b'{"a": 1}',
        b'{"a":1}\n',
        b'{"b":1,"a":2}',
        b'{"a":1,"a":1}',
        b'{"a":1.0}',
        b'{"a":1e400}',
        b'{"a":NaN}',
        b'{"a":01}',
        b'{"a":"\\u0041"}',
        b'{"a":"\\ud800"}',
        b'\xef\xbb\xbf{"a":1}',
        b'{"a":"\xff"}',
        b"[" * 100_000,
        b"9" * 5000,
    ],
)
def test_parse_canonical_of_anything_but_canonical_json_is_refused(data):
    with pytest.raises(IntegrityError):
        parse_canonical(data)


def test_sha256_json_is_the_hash_of_the_canonical_bytes():
    assert sha256_json({"b": 1, "a": 2}) == sha256_bytes(b'{"a":2,"b":1}')


def test_sha256_file_of_several_chunks_equals_the_hash_of_its_bytes(tmp_path):
    data = bytes(range(256)) * 9000
    (tmp_path / "f").write_bytes(data)
    assert sha256_file(tmp_path / "f") == sha256_bytes(data)
