"""Documents of a corpus: order, what is skipped and counted, what is refused."""

import json
import os
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from leadline.core.errors import DataError, UsageError
from leadline.data.corpus import (
    STDLIB_EXCLUDED_FOLDERS,
    CorpusSource,
    Document,
    is_lfs_pointer,
    read_documents,
    stdlib_root,
    stdlib_source,
)

MakeText = Callable[..., Path]
POINTER = (
    b"version https://git-lfs.github.com/spec/v1\n"
    b"oid sha256:" + b"4d7a2146" * 8 + b"\nsize 1073741824\n"
)


def _paths(root: Path, **options: object) -> list[str]:
    source = CorpusSource(root=root, **options)  # type: ignore[arg-type]
    return [document.path for document in read_documents(source)]


def test_documents_come_in_byte_order_of_their_whole_path(text_tree: MakeText) -> None:
    root = text_tree({"b/a": b"1", "b.txt": b"2", "B": b"3", "a/z": b"4", "a/a": b"5"})
    assert _paths(root) == ["B", "a/a", "a/z", "b.txt", "b/a"]


def test_document_keeps_newlines_and_byte_order_mark(text_tree: MakeText) -> None:
    data = b"\xef\xbb\xbfone\r\ntwo\rthree\n"
    root = text_tree({"a": data})
    assert next(read_documents(CorpusSource(root=root))).utf8 == data


def test_skipped_files_are_counted_by_reason(text_tree: MakeText) -> None:
    root = text_tree(
        {
            "good.txt": b"text",
            "empty.txt": b"",
            "latin.txt": b"caf\xe9",
            "nul.txt": b"a\0b",
            "image.png": b"x",
            ".git/config": b"x",
        }
    )
    (root / "link.txt").symlink_to(root / "good.txt")
    os.mkfifo(root / "pipe.txt")
    skipped = Counter[str]()
    documents = list(read_documents(CorpusSource(root=root, suffixes=(".txt",)), skipped=skipped))
    assert [document.path for document in documents] == ["good.txt"]
    assert skipped == {
        "empty": 1,
        "undecodable": 1,
        "binary": 1,
        "other_suffix": 1,
        "excluded_folder": 1,
        "symlink": 1,
        "special_file": 1,
    }


def test_document_of_blanks_alone_counts_as_empty(text_tree: MakeText) -> None:
    skipped = Counter[str]()
    root = text_tree({"a.txt": b"text", "blank.txt": b" \n\t\n"})
    assert len(list(read_documents(CorpusSource(root=root), skipped=skipped))) == 1
    assert skipped == {"empty": 1}


def test_linked_folder_is_not_entered(text_tree: MakeText, tmp_path: Path) -> None:
    root = text_tree({"a.txt": b"text"})
    (tmp_path / "outside").mkdir()
    (tmp_path / "outside" / "b.txt").write_bytes(b"other")
    (root / "loop").symlink_to(root)
    (root / "away").symlink_to(tmp_path / "outside")
    assert _paths(root) == ["a.txt"]


@pytest.mark.parametrize(
    ("files", "reason"),
    [
        ({"a.bin": b"\0\1"}, "1 binary"),
        ({"a.txt": b""}, "1 empty"),
        ({"a.txt": b"\xff\xfe"}, "1 undecodable"),
    ],
)
def test_corpus_without_text_is_refused_with_the_reasons(
    text_tree: MakeText, files: dict[str, bytes], reason: str
) -> None:
    with pytest.raises(DataError, match=f"no usable text .*{reason}"):
        _paths(text_tree(files))


def test_empty_folder_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="it is empty"):
        _paths(tmp_path)


def test_missing_folder_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="nowhere"):
        _paths(tmp_path / "nowhere")


def test_g38_pointer_among_texts_is_refused_with_its_size(text_tree: MakeText) -> None:
    root = text_tree({"a.txt": b"text", "b.txt": POINTER})
    with pytest.raises(DataError, match=rf"b\.txt is a git-lfs pointer of {len(POINTER)} bytes"):
        _paths(root)


def test_g38_text_about_pointers_is_no_pointer() -> None:
    assert is_lfs_pointer(POINTER[:64], len(POINTER))
    assert not is_lfs_pointer(POINTER[:64], 5000)
    assert not is_lfs_pointer(b"A pointer says " + POINTER[:40], len(POINTER))


def test_g38_pointer_in_place_of_jsonl_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "corpus.jsonl"
    path.write_bytes(POINTER)
    with pytest.raises(DataError, match="git-lfs pointer"):
        _paths(path)


def test_max_bytes_takes_whole_documents_and_counts_the_rest(text_tree: MakeText) -> None:
    root = text_tree({"a": b"12345", "b": b"12345", "c": b"1234", "d": b"1"})
    skipped = Counter[str]()
    documents = list(read_documents(CorpusSource(root=root, max_bytes=9), skipped=skipped))
    assert [document.path for document in documents] == ["a", "c"]
    assert skipped == {"over_max_bytes": 2}


def test_max_bytes_below_the_first_document_is_refused(text_tree: MakeText) -> None:
    with pytest.raises(DataError, match="1 over_max_bytes"):
        _paths(text_tree({"a": b"12345"}), max_bytes=4)


def test_jsonl_lines_become_documents_named_by_line(tmp_path: Path) -> None:
    path = tmp_path / "c.jsonl"
    path.write_text('{"text": "one"}\n\n{"text": "two", "source": "x"}\n', encoding="utf-8")
    assert list(read_documents(CorpusSource(root=path))) == [
        Document(path="c.jsonl:1", utf8=b"one"),
        Document(path="c.jsonl:3", utf8=b"two"),
    ]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", "c.jsonl:2 is not JSON"),
        ("[1]", "c.jsonl:2 has no string under `text`"),
        ('{"prompt": "x"}', "c.jsonl:2 has no string"),
        ('{"text": 7}', "c.jsonl:2 has no string"),
    ],
)
def test_jsonl_line_of_another_shape_is_refused(tmp_path: Path, line: str, message: str) -> None:
    path = tmp_path / "c.jsonl"
    path.write_text(f'{{"text": "one"}}\n{line}\n', encoding="utf-8")
    with pytest.raises(DataError, match=message):
        _paths(path)


def test_jsonl_lone_surrogate_is_counted_undecodable(tmp_path: Path) -> None:
    path = tmp_path / "c.jsonl"
    path.write_text('{"text": "one"}\n{"text": "\\ud800"}\n', encoding="utf-8")
    skipped = Counter[str]()
    assert len(list(read_documents(CorpusSource(root=path), skipped=skipped))) == 1
    assert skipped == {"undecodable": 1}


def test_file_of_another_kind_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "corpus.csv"
    path.write_bytes(b"text\n")
    with pytest.raises(UsageError, match="jsonl"):
        _paths(path)


def test_unreadable_file_is_refused_not_skipped(
    text_tree: MakeText, monkeypatch: pytest.MonkeyPatch
) -> None:
    root = text_tree({"a.txt": b"text"})

    def refuse(path: Path) -> bytes:
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr(Path, "read_bytes", refuse)
    with pytest.raises(DataError, match=r"cannot read .*a\.txt: Permission denied"):
        _paths(root)


def test_undecodable_file_name_gets_a_printable_path(text_tree: MakeText) -> None:
    root = text_tree({"a.txt": b"text"})
    (root / os.fsdecode(b"caf\xe9.txt")).write_bytes(b"text")
    assert _paths(root) == ["a.txt", "caf\\xe9.txt"]


def test_stdlib_source_is_python_without_tests_or_packages() -> None:
    source = stdlib_source(max_bytes=300_000)
    paths = [document.path for document in read_documents(source)]
    assert source.root == stdlib_root()
    assert paths
    assert all(path.endswith(".py") for path in paths)
    assert not {part for path in paths for part in path.split("/")} & STDLIB_EXCLUDED_FOLDERS


@settings(max_examples=40, deadline=None)
@given(texts=st.lists(st.text(min_size=1), min_size=1, max_size=6))
def test_jsonl_round_trips_any_text(
    texts: list[str], tmp_path_factory: pytest.TempPathFactory
) -> None:
    path = tmp_path_factory.mktemp("jsonl") / "c.jsonl"
    lines = [json.dumps({"text": text}) for text in ["anchor", *texts]]
    path.write_text("\n".join(lines), encoding="utf-8")
    kept = [text for text in texts if text.encode().strip() and "\0" not in text]
    assert [d.text for d in read_documents(CorpusSource(root=path))] == ["anchor", *kept]
