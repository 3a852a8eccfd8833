import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from leadline.core.errors import DataError, UsageError
from leadline.tap.corpus import open_corpus, tokens_digest

VOCAB = 257
LIMITS = {"vocab_size": VOCAB, "max_document_tokens": None, "max_positions": None}


@pytest.fixture(scope="module")
def bytes_tokenizer(tmp_path_factory):
    """A checkpoint's folder whose tokenizer gives the bytes of a text; no token is added."""
    from leadline.data.tokenizer import BytesEncoder

    folder = tmp_path_factory.mktemp("checkpoint")
    (folder / "tokenizer.json").write_bytes(BytesEncoder().tokenizer_json)
    return folder


@pytest.fixture
def write_texts(tmp_path):
    def write(*values):
        path = tmp_path / "c.jsonl"
        path.write_text("".join(json.dumps({"text": value}) + "\n" for value in values))
        return path

    return write


@pytest.fixture
def write_ids(tmp_path):
    def write(ids, dtype=np.int64):
        np.save(tmp_path / "c.npy", np.array(ids, dtype=dtype))
        return tmp_path / "c.npy"

    return write


def told(corpus):
    return {note.kind: note.count for note in corpus.notes}


def test_open_corpus_gives_the_ids_lengths_and_places_of_every_document(
    write_texts, bytes_tokenizer
):
    corpus = open_corpus(write_texts("a", "lead", "xy"), bytes_tokenizer, **LIMITS)
    assert [bytes(ids.tolist()) for ids in corpus.documents] == [b"a", b"lead", b"xy"]
    assert all(ids.dtype == np.int32 for ids in corpus.documents)
    assert (corpus.num_tokens, corpus.lengths) == (7, (1, 4, 2))
    assert corpus.origins == ("c.jsonl:1", "c.jsonl:2", "c.jsonl:3")
    assert corpus.notes == ()


def test_t37_document_of_a_hundred_thousand_tokens_stays_whole(write_texts, bytes_tokenizer):
    corpus = open_corpus(write_texts("a" * 100_000), bytes_tokenizer, **LIMITS)
    assert corpus.lengths == (100_000,)


def test_t37_document_over_the_models_positions_is_refused_by_number_and_length(
    write_texts, bytes_tokenizer
):
    path = write_texts("a", "a" * 512, "a" * 513)
    wanted = r"document 3 \(c\.jsonl:3\) has 513 tokens.* 512 positions.*--max-document-tokens 512"
    with pytest.raises(DataError, match=wanted):
        open_corpus(path, bytes_tokenizer, **{**LIMITS, "max_positions": 512})


def test_t38_long_documents_are_cut_and_told_and_none_is_dropped(write_texts, bytes_tokenizer):
    path = write_texts(*["a" * 5000] * 10)
    corpus = open_corpus(
        path, bytes_tokenizer, vocab_size=VOCAB, max_document_tokens=2048, max_positions=2048
    )
    assert corpus.lengths == (2048,) * 10
    assert told(corpus) == {"document_truncated": 10}
    assert "29,520 tokens left out" in corpus.notes[0].detail


@pytest.mark.parametrize(("length", "cut"), [(7, 0), (8, 0), (9, 1)])
def test_t38_document_is_cut_only_beyond_the_limit_and_keeps_its_head(write_ids, length, cut):
    path = write_ids(range(length))
    corpus = open_corpus(path, Path("none"), **{**LIMITS, "max_document_tokens": 8})
    assert corpus.documents[0].tolist() == list(range(min(length, 8)))
    assert told(corpus) == ({"document_truncated": 1} if cut else {})


def test_t39_empty_documents_are_left_out_and_told_and_short_ones_used(
    write_texts, bytes_tokenizer
):
    corpus = open_corpus(write_texts("", " ", "a", "b" * 20), bytes_tokenizer, **LIMITS)
    assert corpus.lengths == (1, 20)
    assert told(corpus) == {"document_empty": 2}
    assert "c.jsonl:1, c.jsonl:2" in corpus.notes[0].detail


@pytest.mark.parametrize("values", [["", "", ""], [" \n"], []])
def test_t39_corpus_without_a_token_is_refused(write_texts, bytes_tokenizer, values):
    with pytest.raises(DataError, match=f"no token in {len(values)} documents"):
        open_corpus(write_texts(*values), bytes_tokenizer, **LIMITS)


@pytest.mark.parametrize("shape", [(0,), (3, 0)])
def test_t39_array_without_a_token_is_refused(write_ids, shape):
    with pytest.raises(DataError, match="no token in"):
        open_corpus(write_ids(np.zeros(shape)), Path("none"), **LIMITS)


@pytest.mark.parametrize(
    ("dtype", "bad"),
    [("int64", VOCAB), ("int64", -1), ("uint16", VOCAB), ("int8", -100), ("uint64", 2**40)],
)
def test_id_outside_the_vocabulary_is_refused_by_document_and_position(write_ids, dtype, bad):
    path = write_ids([[1, 2, 3], [4, 5, bad]], dtype)
    wanted = rf"document 2 \(c\.npy\[1\]\) holds the token id {bad} at position 2, wanted 0 to 256"
    with pytest.raises(DataError, match=wanted):
        open_corpus(path, Path("none"), **LIMITS)


def test_id_outside_the_vocabulary_is_refused_even_where_it_would_be_cut_off(write_ids):
    with pytest.raises(DataError, match="at position 2"):
        open_corpus(write_ids([1, 2, 999]), Path("none"), **{**LIMITS, "max_document_tokens": 1})


def test_text_of_a_tokenizer_wider_than_the_model_is_refused(write_texts, bytes_tokenizer):
    with pytest.raises(DataError, match="token id 122 at position 1, wanted 0 to 99"):
        open_corpus(write_texts("az"), bytes_tokenizer, **{**LIMITS, "vocab_size": 100})


def test_text_without_a_tokenizer_is_refused_before_it_is_read(tmp_path):
    (tmp_path / "c.jsonl").write_text("not JSON")
    with pytest.raises(UsageError, match="holds no tokenizer"):
        open_corpus(tmp_path / "c.jsonl", tmp_path, **LIMITS)


def test_ids_need_no_tokenizer_and_name_none(write_ids, tiny_shards):
    for path in (write_ids([1, 2]), tiny_shards, tiny_shards / "eval"):
        assert open_corpus(path, Path("none"), **LIMITS).tokenizer_digest == ""


def test_folder_of_text_tells_what_it_left_out(tmp_path, bytes_tokenizer):
    files = {"a.txt": b"one", "b/c.md": b"two", "d": b"\0", "e.txt": b"\n", ".git/x": b"x"}
    for name, data in files.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(data)
    (tmp_path / "link").symlink_to("a.txt")
    corpus = open_corpus(tmp_path, bytes_tokenizer, **LIMITS)
    assert corpus.origins == ("a.txt", "b/c.md")
    assert told(corpus) == {"document_empty": 1, "file_skipped": 2}
    assert corpus.notes[1].detail == "1 binary, 1 symlink"


def test_corpora_of_equal_documents_have_equal_digests_whatever_their_kind(
    write_texts, write_ids, bytes_tokenizer
):
    text = open_corpus(write_texts("abc", "def"), bytes_tokenizer, **LIMITS)
    rows = [list(b"abc"), list(b"def")]
    found = [open_corpus(write_ids(rows, t), Path("none"), **LIMITS) for t in ("u1", ">i8")]
    assert {corpus.digest for corpus in found} == {text.digest}


def test_digest_takes_more_documents_than_one_batch_in_order(write_texts, bytes_tokenizer):
    values = [f"{number} " * (number % 7 + 1) for number in range(600)]
    seen = []
    corpus = open_corpus(
        write_texts(*values), bytes_tokenizer, **LIMITS, on_progress=lambda *n: seen.append(n)
    )
    assert [bytes(ids.tolist()).decode() for ids in corpus.documents] == values
    assert [documents for documents, _ in seen] == [256, 512, 600]
    assert seen[-1][1] == corpus.num_tokens


@settings(max_examples=60, deadline=None)
@given(
    left=st.lists(st.lists(st.integers(0, 3), min_size=1, max_size=3), max_size=3),
    right=st.lists(st.lists(st.integers(0, 3), min_size=1, max_size=3), max_size=3),
)
def test_tokens_digest_differs_wherever_ids_or_boundaries_do(left, right):
    digests = [
        tokens_digest([np.array(ids, dtype=np.int32) for ids in rows]) for rows in (left, right)
    ]
    assert (digests[0] == digests[1]) == (left == right)


def test_tokens_digest_is_the_one_of_the_first_release():
    documents = [np.array([1, 2, 3], dtype=np.int32), np.array([70000], dtype=np.int32)]
    assert (
        tokens_digest(documents)
        == "cbd38fb34c0396f01160e64ae2422621539b8a6f28776ac77474ef19d0abe34f"
    )


def test_max_document_tokens_of_nothing_is_refused(write_ids):
    with pytest.raises(UsageError, match="--max-document-tokens is 0"):
        open_corpus(write_ids([1]), Path("none"), **{**LIMITS, "max_document_tokens": 0})
