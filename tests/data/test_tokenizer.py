"""Tokenizers: determinism, no injection, and refusals of files that would lie."""

import json
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, models, pre_tokenizers

from leadline.core.errors import DataError, UsageError
from leadline.data.corpus import Document
from leadline.data.tokenizer import (
    END_OF_TEXT,
    BytesEncoder,
    Encoder,
    LibraryEncoder,
    make_encoder,
    parse_spec,
    spec_request,
)

TEXTS = [f"the lead line is {number} fathoms long\n" * 5 for number in range(20)]
ANY_TEXT = st.text(st.characters(exclude_categories=["Cs"]), min_size=1)


def _document(text: str) -> Document:
    return Document(path="a.txt", utf8=text.encode())


def _bpe(vocab_size: int = 290) -> Encoder:
    return make_encoder(parse_spec("bpe", vocab_size), iter(TEXTS))


def _given(path: Path, change: object = None, **options: object) -> Path:
    value = json.loads(_bpe().tokenizer_json)
    if isinstance(change, dict):
        value.update(change)
    value.update(options)
    path.write_text(json.dumps(value), encoding="utf-8")
    return path


def test_bpe_of_the_same_text_has_the_same_bytes() -> None:
    assert _bpe().tokenizer_json == _bpe().tokenizer_json


def test_bpe_of_other_text_has_other_bytes() -> None:
    other = make_encoder(parse_spec("bpe", 300), iter(["ships sink in deep water\n"] * 20))
    assert other.tokenizer_json != _bpe().tokenizer_json


def test_bpe_learns_merges_up_to_the_size_asked() -> None:
    encoder = _bpe(290)
    assert encoder.vocab_size == 290
    assert len(encoder.encode([_document(TEXTS[0])])[0]) < len(TEXTS[0])


@settings(max_examples=30, deadline=None)
@given(text=ANY_TEXT)
def test_bpe_decodes_to_the_text_it_encoded(text: str) -> None:
    encoder = _bpe()
    ids = encoder.encode([_document(text)])[0]
    assert Tokenizer.from_str(encoder.tokenizer_json.decode()).decode(ids.tolist()) == text


@settings(max_examples=50, deadline=None)
@given(text=ANY_TEXT)
def test_bytes_tokenizer_file_gives_the_ids_of_the_fast_path(text: str) -> None:
    encoder = BytesEncoder()
    slow = LibraryEncoder(encoder.tokenizer_json, END_OF_TEXT, "bytes")
    ids = encoder.encode([_document(text)])[0]
    assert ids.tolist() == list(text.encode())
    assert slow.encode([_document(text)])[0].tolist() == ids.tolist()
    assert (slow.vocab_size, slow.end_of_text) == (257, 256)


@pytest.mark.parametrize("kind", ["bpe", "bytes"])
def test_text_that_spells_the_special_token_stays_text(kind: str) -> None:
    encoder = make_encoder(parse_spec(kind), iter(TEXTS))
    ids = encoder.encode([_document(f"a{END_OF_TEXT}b")])[0]
    assert encoder.end_of_text not in ids
    assert ids.size > 3


def test_given_tokenizer_text_that_spells_its_special_token_stays_text(tmp_path: Path) -> None:
    encoder = make_encoder(parse_spec(str(_given(tmp_path / "t.json"))), ())
    assert encoder.end_of_text not in encoder.encode([_document(f"a{END_OF_TEXT}")])[0]


def test_given_tokenizer_that_maps_text_to_the_closing_id_is_refused(tmp_path: Path) -> None:
    path = _given(tmp_path / "t.json")
    value = json.loads(path.read_text(encoding="utf-8"))
    value["added_tokens"][0]["special"] = False
    path.write_text(json.dumps(value), encoding="utf-8")
    encoder = make_encoder(parse_spec(str(path)), ())
    with pytest.raises(DataError, match=r"a\.txt encodes to the end-of-text id 0"):
        encoder.encode([_document(f"a{END_OF_TEXT}b")])


def test_given_tokenizer_that_truncates_or_pads_does_neither_here(tmp_path: Path) -> None:
    truncation = {
        "direction": "Right",
        "max_length": 2,
        "strategy": "LongestFirst",
        "stride": 0,
    }
    padding = {
        "strategy": {"Fixed": 64},
        "direction": "Right",
        "pad_to_multiple_of": None,
        "pad_id": 0,
        "pad_type_id": 0,
        "pad_token": END_OF_TEXT,
    }
    path = _given(tmp_path / "t.json", truncation=truncation, padding=padding)
    encoder = make_encoder(parse_spec(str(path)), ())
    text = "fathoms in deep water"
    assert (
        encoder.encode([_document(text)])[0].tolist()
        == _bpe().encode([_document(text)])[0].tolist()
    )


def test_given_tokenizer_keeps_its_bytes(tmp_path: Path) -> None:
    path = _given(tmp_path / "t.json")
    assert make_encoder(parse_spec(str(path)), ()).tokenizer_json == path.read_bytes()


def test_given_tokenizer_vocabulary_counts_gaps_in_its_ids(tmp_path: Path) -> None:
    tokenizer = Tokenizer(models.WordLevel({"a": 0, "b": 50_300, "[END]": 3}, unk_token="a"))
    path = tmp_path / "t.json"
    path.write_text(tokenizer.to_str(), encoding="utf-8")
    encoder = make_encoder(parse_spec(str(path), end_of_text="[END]"), ())
    assert (encoder.vocab_size, encoder.end_of_text) == (50_301, 3)


def test_given_tokenizer_without_the_closing_token_is_refused(tmp_path: Path) -> None:
    path = _given(tmp_path / "t.json")
    with pytest.raises(DataError, match=r"no token '</s>' .* --end-of-text"):
        make_encoder(parse_spec(str(path), end_of_text="</s>"), ())


def test_given_tokenizer_of_another_size_than_asked_is_refused(tmp_path: Path) -> None:
    path = _given(tmp_path / "t.json")
    with pytest.raises(UsageError, match="50257 asked for, but this tokenizer has 290"):
        make_encoder(parse_spec(str(path), 50257), ())


@pytest.mark.parametrize("data", [b"", b"{", b"{}", b"\xff\xfe", b'{"model": 3}', b"[]"])
def test_corrupt_tokenizer_file_is_refused(tmp_path: Path, data: bytes) -> None:
    path = tmp_path / "t.json"
    path.write_bytes(data)
    with pytest.raises(DataError, match=r"t\.json is not a tokenizer\.json"):
        make_encoder(parse_spec(str(path)), ())


def test_tokenizer_that_drops_a_whole_document_is_refused(tmp_path: Path) -> None:
    tokenizer = Tokenizer(models.BPE({"a": 0, END_OF_TEXT: 1}, []))
    path = tmp_path / "t.json"
    path.write_text(tokenizer.to_str(), encoding="utf-8")
    encoder = make_encoder(parse_spec(str(path)), ())
    with pytest.raises(DataError, match=r"no token for a\.txt"):
        encoder.encode([_document("xyz")])


def test_tokenizer_that_fails_on_a_document_is_refused(tmp_path: Path) -> None:
    tokenizer = Tokenizer(models.WordLevel({"a": 0, END_OF_TEXT: 1}, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    path = tmp_path / "t.json"
    path.write_text(tokenizer.to_str(), encoding="utf-8")
    encoder = make_encoder(parse_spec(str(path)), ())
    with pytest.raises(DataError, match=r"cannot encode a\.txt"):
        encoder.encode([_document("xyz")])


@pytest.mark.parametrize("vocab_size", [-1, 0, 256, 2**31 + 1])
def test_bpe_vocabulary_that_cannot_be_trained_is_refused(vocab_size: int) -> None:
    with pytest.raises(UsageError, match=f"vocabulary of {vocab_size} cannot be trained"):
        parse_spec("bpe", vocab_size)


def test_bytes_vocabulary_of_another_size_is_refused() -> None:
    with pytest.raises(UsageError, match="8192 asked for, but this tokenizer has 257"):
        make_encoder(parse_spec("bytes", 8192), ())


@pytest.mark.parametrize("kind", ["bpe", "bytes"])
def test_closing_token_of_a_built_tokenizer_cannot_be_changed(kind: str) -> None:
    with pytest.raises(UsageError, match="</s>"):
        parse_spec(kind, end_of_text="</s>")


def test_tokenizer_file_that_is_missing_is_refused() -> None:
    with pytest.raises(UsageError, match=r"no tokenizer 'gone\.json'"):
        parse_spec("gone.json")


def test_request_of_a_given_tokenizer_names_its_hash_not_its_path(tmp_path: Path) -> None:
    first, second = _given(tmp_path / "a.json"), _given(tmp_path / "b.json")
    assert spec_request(parse_spec(str(first))) == spec_request(parse_spec(str(second)))
    assert str(tmp_path) not in str(spec_request(parse_spec(str(first))))
