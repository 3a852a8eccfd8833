import json
from collections import Counter

import pytest

from leadline.core.errors import DataError, LeadlineError, UsageError
from leadline.tap.documents import Chat, corpus_kind, read_documents


@pytest.fixture
def write_lines(tmp_path):
    """Write TMP/c.jsonl; a string or bytes goes in as it is, anything else as JSON."""

    def write(*lines):
        path = tmp_path / "c.jsonl"
        raw = [line if isinstance(line, bytes) else json.dumps(line).encode() for line in lines]
        path.write_bytes(b"\n".join(raw))
        return path

    return write


def contents(path, **options):
    return [document.content for document in read_documents(path, **options)]


@pytest.mark.parametrize("field", ["text", "prompt"])
def test_jsonl_gives_the_string_of_each_line_with_its_number(write_lines, field):
    path = write_lines({field: "one"}, b"", {field: "", "source": "x"}, {field: "three"})
    found = [(document.origin, document.content) for document in read_documents(path)]
    assert found == [("c.jsonl:1", "one"), ("c.jsonl:3", ""), ("c.jsonl:4", "three")]


def test_jsonl_gives_messages_and_tools_as_a_chat(write_lines):
    messages = [{"role": "user", "content": "hi"}]
    path = write_lines({"messages": messages, "tools": [{"name": "f"}]}, {"messages": []})
    assert contents(path) == [
        Chat(messages=messages, tools=[{"name": "f"}]),
        Chat(messages=[]),
    ]


def test_jsonl_text_field_names_the_field_where_several_could_be_meant(write_lines):
    path = write_lines({"text": "a", "prompt": "b", "own": "c"})
    assert [contents(path, text_field=name) for name in ("text", "own")] == [["a"], ["c"]]


@pytest.mark.parametrize(
    ("line", "told"),
    [
        (b'{"text": "a', "is not JSON"),
        (b'{"text": "\xff"}', "is not JSON"),
        (b"[" * 20_000, "is not JSON"),
        (["a"], "is a JSON list"),
        ({"body": "a"}, "none of text"),
        ({"text": "a", "messages": []}, "`text` and `messages`"),
        ({"prompt": "a"}, "`prompt` where line 1 has `text`"),
        ({"text": None}, "null under `text`"),
        ({"text": 7}, "7 under `text`"),
        ({"text": ["a"]}, "message 1 without a role"),
        ({"text": [{"role": "u"}], "tools": "f"}, '"f" under `tools`'),
    ],
)
def test_jsonl_line_that_is_no_document_is_refused_by_number(write_lines, line, told):
    path = write_lines({"text": "fine"}, line)
    with pytest.raises(DataError, match=r"c\.jsonl:2 ") as refused:
        contents(path)
    assert told in str(refused.value)


def test_text_file_is_one_document(tmp_path):
    path = tmp_path / "a.txt"
    path.write_bytes("caf\u00e9\r\n\n".encode())
    found = list(read_documents(path))
    assert [(d.origin, d.content) for d in found] == [("a.txt", "caf\u00e9\r\n\n")]


@pytest.mark.parametrize(("data", "told"), [(b"ab\xff", "byte 2"), (b"ab\0c", "character 2")])
def test_text_file_of_other_bytes_is_refused_at_its_place(tmp_path, data, told):
    path = tmp_path / "a.txt"
    path.write_bytes(data)
    with pytest.raises(DataError, match=told):
        contents(path)


def test_folder_gives_its_text_in_path_order_and_counts_the_rest(tmp_path):
    for name, data in {"b/z.txt": b"2", "a.md": b"1", "c": b"\xff", "d.txt": b" \n"}.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(data)
    skipped = Counter()
    found = [(d.origin, d.content) for d in read_documents(tmp_path, skipped=skipped)]
    assert found == [("a.md", "1"), ("b/z.txt", "2")]
    assert skipped == {"undecodable": 1, "empty": 1}


@pytest.mark.parametrize("name", ["train.jsonl", "ids.npy", "shard.bin"])
def test_folder_with_a_file_that_is_no_plain_text_is_refused_by_its_name(tmp_path, name):
    (tmp_path / "a.txt").write_text("a")
    (tmp_path / name).write_text("{}")
    with pytest.raises(UsageError, match=name):
        corpus_kind(tmp_path)


@pytest.mark.parametrize("name", ["c.json", "c.parquet", "c.jsonl.gz", "c"])
def test_file_of_an_unknown_kind_is_refused_with_the_known_ones(tmp_path, name):
    (tmp_path / name).write_text("{}")
    with pytest.raises(UsageError, match=r"\.jsonl, \.npy, \.bin, \.txt, \.md"):
        corpus_kind(tmp_path / name)


def test_corpus_that_is_not_there_is_refused(tmp_path):
    with pytest.raises(UsageError, match="no corpus at"):
        contents(tmp_path / "none.jsonl")


def test_text_field_of_what_has_no_fields_is_refused(tmp_path):
    (tmp_path / "a.txt").write_text("a")
    with pytest.raises(UsageError, match="no field 'text'"):
        contents(tmp_path / "a.txt", text_field="text")


@pytest.mark.parametrize("name", ["c.jsonl", "c.txt", "c.npy"])
def test_git_lfs_pointer_is_refused_with_the_command_that_fetches(tmp_path, name):
    (tmp_path / name).write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0\n")
    with pytest.raises(DataError, match="git lfs pull"):
        contents(tmp_path / name)


def test_name_that_is_a_broken_link_is_refused(tmp_path):
    (tmp_path / "c.jsonl").symlink_to("nothing")
    with pytest.raises(LeadlineError, match="no corpus at"):
        contents(tmp_path / "c.jsonl")
