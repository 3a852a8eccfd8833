import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from leadline.core.canonical import canonical_bytes, sha256_file
from leadline.core.errors import DiskSpaceError, LeadlineError, LockError
from leadline.core.lockfile import LOCK_FILE, ConfigLock, read_lock, write_lock

PAYLOAD = {
    "schema": 1,
    "locked_budget_tokens": 2_662_200_000,
    "tok_s": 120_000,
    "total_steps": 81_243,
    "tokens_in_steps": 2_662_170_624,
    "micro_batch": 64,
    "seq_len": 512,
    "ledger_lines": 9,
    "best_cfg": "P2",
    "code_sha256": "c" * 64,
    "manifest_sha256": "d" * 64,
    "environment_fingerprint": "e" * 64,
    "ledger_head": "f" * 64,
}
INTEGERS = [key for key, value in PAYLOAD.items() if isinstance(value, int)]
STRINGS = [key for key, value in PAYLOAD.items() if isinstance(value, str)]


def _put(folder, data):
    (folder / LOCK_FILE).write_bytes(data)


def test_lock_written_is_read_back_equal(tmp_path):
    lock = ConfigLock(payload=PAYLOAD)
    write_lock(tmp_path, lock)
    assert read_lock(tmp_path) == lock


def test_lock_bytes_are_canonical_json_and_a_newline(tmp_path):
    path = write_lock(tmp_path, ConfigLock(payload=PAYLOAD))
    assert path.read_bytes() == canonical_bytes(PAYLOAD) + b"\n"


def test_lock_hash_is_that_of_its_file(tmp_path):
    lock = ConfigLock(payload=PAYLOAD)
    assert lock.sha256 == sha256_file(write_lock(tmp_path, lock))


def test_lock_file_may_not_be_written_by_accident(tmp_path):
    path = write_lock(tmp_path, ConfigLock(payload=PAYLOAD))
    assert path.stat().st_mode & 0o222 == 0


def test_lock_anchor_is_the_ledger_it_was_made_over():
    anchor = ConfigLock(payload=PAYLOAD).anchor
    assert (anchor.lines, anchor.hash) == (9, "f" * 64)


@pytest.mark.parametrize("other", [PAYLOAD, {**PAYLOAD, "tok_s": 1}], ids=["same", "other"])
def test_lock_that_exists_is_never_overwritten(tmp_path, other):
    path = write_lock(tmp_path, ConfigLock(payload=PAYLOAD))
    before = path.read_bytes()
    with pytest.raises(LockError, match="never overwritten"):
        write_lock(tmp_path, ConfigLock(payload=other))
    assert path.read_bytes() == before
    assert [item.name for item in tmp_path.iterdir()] == [LOCK_FILE]


def test_lock_without_room_leaves_nothing(tmp_path, full_disk):
    with pytest.raises(DiskSpaceError, match="disk is full"):
        write_lock(tmp_path, ConfigLock(payload=PAYLOAD))
    assert list(tmp_path.iterdir()) == []


def test_lock_into_a_missing_folder_is_refused_with_its_name(tmp_path):
    with pytest.raises(LeadlineError, match=r"gone.*config\.lock\.json"):
        write_lock(tmp_path / "gone", ConfigLock(payload=PAYLOAD))


def test_lock_keeps_keys_it_does_not_know(tmp_path):
    payload = {**PAYLOAD, "from_a_newer_version": {"list": [1, "a", None, True]}}
    write_lock(tmp_path, ConfigLock(payload=payload))
    assert read_lock(tmp_path).payload == payload


@settings(deadline=None, max_examples=40)
@given(st.dictionaries(st.text(min_size=1, max_size=8), st.integers(-(2**53) + 1, 2**53 - 1)))
def test_lock_bytes_of_any_extra_keys_read_back_equal(tmp_path_factory, extra):
    folder = tmp_path_factory.mktemp("lock")
    lock = ConfigLock(payload={**extra, **PAYLOAD})
    write_lock(folder, lock)
    assert read_lock(folder) == lock


@pytest.mark.parametrize("key", PAYLOAD)
def test_lock_without_a_key_is_refused_by_name(tmp_path, key):
    _put(tmp_path, canonical_bytes({k: v for k, v in PAYLOAD.items() if k != key}) + b"\n")
    with pytest.raises(LockError, match=f"key {key} is None"):
        read_lock(tmp_path)


@pytest.mark.parametrize("value", ["1", None, True, False, 1.0, [1], {"a": 1}])
@pytest.mark.parametrize("key", INTEGERS)
def test_lock_with_an_integer_of_another_type_is_refused_by_name(key, value):
    with pytest.raises(LockError, match=f"key {key} is .*wanted int"):
        ConfigLock(payload={**PAYLOAD, key: value})


@pytest.mark.parametrize("value", [1, None, True, 1.0, ["P1"], {"a": 1}])
@pytest.mark.parametrize("key", STRINGS)
def test_lock_with_a_string_of_another_type_is_refused_by_name(key, value):
    with pytest.raises(LockError, match=f"key {key} is .*wanted str"):
        ConfigLock(payload={**PAYLOAD, key: value})


@pytest.mark.parametrize("schema", [0, 2, -1])
def test_lock_of_another_schema_is_refused_with_both_numbers(tmp_path, schema):
    _put(tmp_path, canonical_bytes({**PAYLOAD, "schema": schema}) + b"\n")
    with pytest.raises(LockError, match=f"schema {schema}, this program reads 1"):
        read_lock(tmp_path)


GOOD = canonical_bytes(PAYLOAD)
BAD_BYTES = {
    "spaced": json.dumps(PAYLOAD, sort_keys=True).encode() + b"\n",
    "indented": json.dumps(PAYLOAD, sort_keys=True, indent=2).encode() + b"\n",
    "unsorted": json.dumps(PAYLOAD, separators=(",", ":")).encode() + b"\n",
    "no newline": GOOD,
    "two newlines": GOOD + b"\n\n",
    "windows newline": GOOD + b"\r\n",
    "trailing bytes": GOOD + b"\n{}",
    "leading blank": b" " + GOOD + b"\n",
    "byte order mark": b"\xef\xbb\xbf" + GOOD + b"\n",
    "half": GOOD[: len(GOOD) // 2],
    "empty": b"",
    "not utf-8": b"\xff\xfe" + GOOD,
    "list": b"[]\n",
    "number": b"1\n",
    "key twice": GOOD[:-1] + b',"tok_s":1}\n',
    "exponent": GOOD.replace(b"120000", b"1.2e5") + b"\n",
    "float": GOOD[:-1] + b',"zz":1.5}\n',
    "escaped letter": GOOD.replace(b'"P2"', b'"\\u00502"') + b"\n",
    "beyond 2**53": GOOD.replace(b":120000", b":12000000000000000000") + b"\n",
}


@pytest.mark.parametrize("name", BAD_BYTES)
def test_lock_of_other_bytes_is_refused(tmp_path, name):
    _put(tmp_path, BAD_BYTES[name])
    with pytest.raises(LockError, match=r"config\.lock\.json"):
        read_lock(tmp_path)


def test_lock_with_any_byte_flipped_is_refused_or_another(tmp_path):
    lock = ConfigLock(payload=PAYLOAD)
    for index in range(len(lock.content)):
        data = bytearray(lock.content)
        data[index] ^= 1
        _put(tmp_path, bytes(data))
        try:
            assert read_lock(tmp_path).sha256 != lock.sha256
        except LockError:
            continue


def test_lock_that_is_not_there_is_refused_with_the_command_that_writes_it(tmp_path):
    with pytest.raises(LockError, match="leadline gate run"):
        read_lock(tmp_path)


def test_lock_that_is_a_folder_is_refused(tmp_path):
    (tmp_path / LOCK_FILE).mkdir()
    with pytest.raises(LeadlineError, match="Is a directory"):
        read_lock(tmp_path)
