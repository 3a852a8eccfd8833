import io

import pytest

from leadline.core.canonical import sha256_bytes
from leadline.core.errors import IntegrityError
from leadline.core.manifest import FileEntry, Manifest, check_stream
from leadline.pack.control import choose_entry, control_problem, negative_control

_CONTENT = bytes(range(200))
_ENTRY = FileEntry(path="f.bin", bytes=200, sha256=sha256_bytes(_CONTENT))


def _entry(path, size):
    return FileEntry(path=path, bytes=size, sha256="0" * 64)


def test_control_reports_file_offset_and_what_the_checker_said():
    result = negative_control(_ENTRY, io.BytesIO(_CONTENT), seed="s", offset=7)
    assert (result.file, result.offset, result.found) == ("f.bin", 7, True)
    assert "f.bin has the sha256" in result.said


@pytest.mark.parametrize("offset", [0, 1, 199])
def test_control_flips_exactly_one_byte_of_the_copy(offset):
    seen = []

    def checker(stream, entry):
        data = stream.read(1000)
        seen.append([n for n, (a, b) in enumerate(zip(data, _CONTENT, strict=True)) if a != b])
        return check_stream(io.BytesIO(data), entry)

    negative_control(_ENTRY, io.BytesIO(_CONTENT), seed="s", offset=offset, checker=checker)
    assert seen == [[], [offset]]


def test_control_leaves_the_content_itself_alone():
    content = io.BytesIO(_CONTENT)
    negative_control(_ENTRY, content, seed="s")
    assert content.getvalue() == _CONTENT


def test_control_with_a_checker_that_sees_nothing_says_it_is_blind():
    with pytest.raises(IntegrityError, match="the checker is blind"):
        negative_control(_ENTRY, io.BytesIO(_CONTENT), seed="s", checker=lambda *_: None)


def test_control_with_a_checker_that_sees_only_sizes_says_it_is_blind():
    def sizes_only(stream, entry):
        return None if len(stream.read(1000)) == entry.bytes else "size differs"

    with pytest.raises(IntegrityError, match="blind"):
        negative_control(_ENTRY, io.BytesIO(_CONTENT), seed="s", checker=sizes_only)


def test_control_with_a_checker_that_fails_everything_is_no_control():
    with pytest.raises(IntegrityError, match=r"untouched copy of f\.bin fails"):
        negative_control(_ENTRY, io.BytesIO(_CONTENT), seed="s", checker=lambda *_: "no")


def test_control_of_one_seed_picks_the_same_byte():
    first, second = (
        negative_control(_ENTRY, io.BytesIO(_CONTENT), seed="s").offset for _ in range(2)
    )
    assert first == second


def test_choose_entry_passes_over_empty_files():
    entries = [_entry("empty", 0), _entry("full", 5)]
    assert {choose_entry(entries, str(seed)).path for seed in range(20)} == {"full"}


def test_choose_entry_prefers_files_that_are_cheap_to_copy():
    entries = [_entry("huge", 10**12), _entry("small", 10)]
    assert {choose_entry(entries, str(seed)).path for seed in range(20)} == {"small"}


def test_choose_entry_among_huge_files_takes_the_smallest():
    entries = [_entry("huger", 10**12), _entry("huge", 10**11)]
    assert choose_entry(entries, "s").path == "huge"


def test_choose_entry_of_another_seed_takes_another_file_in_the_end():
    entries = [_entry("a", 5), _entry("b", 5)]
    assert {choose_entry(entries, str(seed)).path for seed in range(20)} == {"a", "b"}


def test_control_problem_of_a_pack_without_a_byte_says_so():
    result, problems = control_problem(Manifest(files=(_entry("empty", 0),)), lambda _: None)
    assert result is None
    assert "no byte in any file" in problems[0]
