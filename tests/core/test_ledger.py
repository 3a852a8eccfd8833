import errno
import json
import os
import resource
import subprocess
import sys

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from leadline.core import ledger as ledger_module
from leadline.core.canonical import canonical_bytes, sha256_bytes
from leadline.core.errors import DiskSpaceError, IntegrityError, LeadlineError, UsageError
from leadline.core.ledger import GENESIS, Head, Ledger, utc_now, verify_ledger

_TIME = "2026-01-02T03:04:05.678901Z"


def _ledger(folder, lines=12, now=lambda: _TIME):
    ledger = Ledger(folder / "ledger.jsonl", now)
    for number in range(lines):
        ledger.append("note", {"number": number, "text": "a \u20ac line"})
    return ledger


def _kinds(ledger):
    return [entry.kind for entry in ledger.entries()]


def test_append_writes_one_canonical_line_hashed_over_itself_without_hash(tmp_path):
    entry = _ledger(tmp_path, lines=1).append("evidence", {"sha256": "ab", "green": True})
    line = (tmp_path / "ledger.jsonl").read_bytes().split(b"\n")[1]
    parsed = json.loads(line)
    assert canonical_bytes(parsed) == line
    assert parsed.pop("hash") == entry.hash == sha256_bytes(canonical_bytes(parsed))
    assert parsed == {
        "seq": 2, "time": _TIME, "kind": "evidence", "prev": entry.prev,
        "data": {"sha256": "ab", "green": True},
    }  # fmt: skip


def test_first_entry_follows_the_genesis_hash(tmp_path):
    assert _ledger(tmp_path, lines=1).entries()[0].prev == GENESIS


def test_entries_come_back_as_appended(tmp_path):
    ledger = Ledger(tmp_path / "ledger.jsonl")
    made = [ledger.append("note", {"n": [1, {"a": None}]}), ledger.append("other", {})]
    assert ledger.entries() == made


def test_append_shares_nothing_with_the_callers_data(tmp_path):
    ledger, data = Ledger(tmp_path / "ledger.jsonl"), {"list": [1]}
    entry = ledger.append("note", data)
    data["list"].append(2)
    assert entry.data == {"list": [1]}


def test_head_of_twelve_lines_is_the_last_hash_and_twelve(tmp_path):
    ledger = _ledger(tmp_path)
    assert ledger.head() == Head(lines=12, hash=ledger.entries()[-1].hash)


def test_verify_of_a_sound_ledger_is_ok(tmp_path):
    ledger = _ledger(tmp_path)
    check = verify_ledger(ledger.path, ledger.head())
    assert (check.ok, check.lines, check.first_bad, check.reason) == (True, 12, None, "")
    assert check.head == ledger.head()
    assert (check.torn, check.repairs, check.clock_backwards) == (False, (), ())


def test_verify_of_an_empty_file_is_ok_with_no_lines(tmp_path):
    (tmp_path / "ledger.jsonl").write_bytes(b"")
    check = verify_ledger(tmp_path / "ledger.jsonl")
    assert (check.ok, check.head) == (True, Head(lines=0, hash=GENESIS))


def test_verify_of_a_missing_ledger_names_the_path(tmp_path):
    with pytest.raises(IntegrityError, match="no ledger at"):
        verify_ledger(tmp_path / "ledger.jsonl")


def test_utc_now_has_the_ledgers_form(tmp_path):
    assert _ledger(tmp_path, lines=1, now=utc_now).entries()[0].time.endswith("Z")


@pytest.mark.parametrize(
    ("kind", "data"),
    [
        ("", {}),
        ("two words", {}),
        ("x" * 101, {}),
        ("ledger.repaired", {}),
        ("clock.backwards", {}),
        ("note", {"loss": 0.5}),
        ("note", {"n": 2**53}),
        ("note", {"text": "\ud800"}),
    ],
)
def test_append_of_an_unusable_kind_or_data_touches_no_file(tmp_path, kind, data):
    with pytest.raises(UsageError):
        Ledger(tmp_path / "run" / "ledger.jsonl").append(kind, data)
    assert not any(tmp_path.iterdir())


def test_append_with_an_unusable_time_is_refused(tmp_path):
    with pytest.raises(UsageError, match="yesterday"):
        Ledger(tmp_path / "ledger.jsonl", lambda: "yesterday").append("note", {})


# Edits: every one is found.


@pytest.fixture(scope="module")
def sound(tmp_path_factory):
    folder = tmp_path_factory.mktemp("sound")
    ledger = _ledger(folder, lines=5)
    return ledger.path.read_bytes(), ledger.head(), folder / "edited.jsonl"


def _is_found(sound, edited):
    content, anchor, path = sound
    path.write_bytes(edited)
    check = verify_ledger(path, anchor)
    assert edited != content
    assert not check.ok
    assert check.reason
    return check


@given(data=st.data())
@settings(max_examples=150, deadline=None)
def test_verify_finds_any_single_byte_change(sound, data):
    content = bytearray(sound[0])
    at = data.draw(st.integers(0, len(content) - 1))
    content[at] ^= data.draw(st.integers(1, 255))
    check = _is_found(sound, bytes(content))
    # A change of line N shows at N; one that glues two lines shows at the first of them.
    assert check.first_bad == sound[0].count(b"\n", 0, at) + 1


@given(data=st.data())
@settings(max_examples=60, deadline=None)
def test_verify_finds_any_deleted_byte(sound, data):
    at = data.draw(st.integers(0, len(sound[0]) - 1))
    _is_found(sound, sound[0][:at] + sound[0][at + 1 :])


@given(data=st.data())
@settings(max_examples=60, deadline=None)
def test_verify_finds_any_inserted_byte(sound, data):
    at = data.draw(st.integers(0, len(sound[0])))
    byte = data.draw(st.binary(min_size=1, max_size=1))
    _is_found(sound, sound[0][:at] + byte + sound[0][at:])


@given(data=st.data())
@settings(max_examples=60, deadline=None)
def test_verify_finds_truncation_at_any_byte(sound, data):
    _is_found(sound, sound[0][: data.draw(st.integers(0, len(sound[0]) - 1))])


@pytest.mark.parametrize("line", range(4))
def test_verify_finds_a_swap_of_neighbours_at_the_first_of_them(sound, line):
    lines = sound[0].splitlines(keepends=True)
    lines[line], lines[line + 1] = lines[line + 1], lines[line]
    assert _is_found(sound, b"".join(lines)).first_bad == line + 1


@pytest.mark.parametrize("line", range(5))
def test_verify_finds_a_deleted_line(sound, line):
    lines = sound[0].splitlines(keepends=True)
    del lines[line]
    assert _is_found(sound, b"".join(lines)).first_bad == line + 1


def test_verify_finds_a_repeated_line(sound):
    lines = sound[0].splitlines(keepends=True)
    assert _is_found(sound, b"".join([*lines[:3], lines[2], *lines[3:]])).first_bad == 4


@pytest.mark.parametrize("line", [b"[" * 50_000, b"{}", b"\xff", b'{"seq":6}', b"", b"null"])
def test_verify_of_a_foreign_line_is_red_without_a_crash(sound, line):
    assert _is_found(sound, sound[0] + line + b"\n").first_bad == 6


@pytest.mark.parametrize(
    "change",
    [{"seq": True}, {"time": "2026-01-02"}, {"kind": "a b"}, {"data": []}, {"prev": 0}, {"x": 1}],
)
def test_verify_of_a_rehashed_line_of_another_shape_is_red(tmp_path, change):
    body = {"seq": 1, "time": _TIME, "kind": "note", "data": {}, "prev": GENESIS, **change}
    line = canonical_bytes({**body, "hash": sha256_bytes(canonical_bytes(body))})
    (tmp_path / "l").write_bytes(line + b"\n")
    assert verify_ledger(tmp_path / "l").first_bad == 1


def test_verify_finds_a_sound_line_of_another_ledger(tmp_path):
    ours, theirs = (Ledger(tmp_path / name, lambda: _TIME) for name in ("ours", "theirs"))
    for number in range(3):
        ours.append("note", {"number": number})
        theirs.append("note", {"number": -number - 1})
    lines = ours.path.read_bytes().splitlines(keepends=True)
    lines[2] = theirs.path.read_bytes().splitlines(keepends=True)[2]
    ours.path.write_bytes(b"".join(lines))
    check = verify_ledger(ours.path)
    assert check.first_bad == 3
    assert "follows the hash" in check.reason


def test_verify_finds_a_wrong_number_in_a_line_that_is_otherwise_sound(tmp_path):
    body = {"seq": 7, "time": _TIME, "kind": "note", "data": {}, "prev": GENESIS}
    line = canonical_bytes({**body, "hash": sha256_bytes(canonical_bytes(body))})
    (tmp_path / "l").write_bytes(line + b"\n")
    check = verify_ledger(tmp_path / "l")
    assert check.first_bad == 1
    assert "says it is number 7" in check.reason


# G55: cut tails and rewritten tails; G54: torn last lines.


def test_g55_cut_tail_is_red_given_the_anchor_and_fine_without(tmp_path):
    ledger = _ledger(tmp_path)
    anchor, lines = ledger.head(), ledger.path.read_bytes().splitlines(keepends=True)
    ledger.path.write_bytes(b"".join(lines[:10]))
    assert verify_ledger(ledger.path).ok
    check = verify_ledger(ledger.path, anchor)
    assert (check.ok, check.first_bad) == (False, 11)
    assert "2 lines were cut off" in check.reason


def test_g55_rewritten_tail_with_fresh_hashes_is_red_given_the_anchor(tmp_path):
    ledger = _ledger(tmp_path)
    anchor, lines = ledger.head(), ledger.path.read_bytes().splitlines(keepends=True)
    ledger.path.write_bytes(b"".join(lines[:7]))
    for number in range(7, 12):
        ledger.append("note", {"number": number, "text": "another story"})
    assert verify_ledger(ledger.path).ok
    check = verify_ledger(ledger.path, anchor)
    assert (check.ok, check.first_bad) == (False, 12)


def test_g55_ledger_grown_beyond_its_anchor_is_ok(tmp_path):
    ledger = _ledger(tmp_path)
    anchor = ledger.head()
    ledger.append("lock.written", {})
    assert verify_ledger(ledger.path, anchor).ok


@pytest.mark.parametrize("anchor", [Head(lines=0, hash=GENESIS), Head(lines=0, hash="f" * 64)])
def test_g55_anchor_of_an_empty_ledger_must_be_the_genesis(tmp_path, anchor):
    assert verify_ledger(_ledger(tmp_path).path, anchor).ok == (anchor.hash == GENESIS)


def test_g54_last_line_without_its_newline_is_red_and_named(tmp_path):
    ledger = _ledger(tmp_path)
    ledger.path.write_bytes(ledger.path.read_bytes()[:-1])
    check = verify_ledger(ledger.path)
    assert (check.ok, check.lines, check.first_bad, check.torn) == (False, 12, 12, True)


def test_g54_append_after_a_missing_newline_adds_it_and_loses_nothing(tmp_path):
    ledger = _ledger(tmp_path)
    anchor = ledger.head()
    ledger.path.write_bytes(ledger.path.read_bytes()[:-1])
    ledger.append("after", {})
    assert verify_ledger(ledger.path, anchor).ok
    assert _kinds(ledger)[11:] == ["note", "after"]


def test_g54_half_of_the_last_line_is_red_and_named(tmp_path):
    ledger = _ledger(tmp_path)
    ledger.path.write_bytes(ledger.path.read_bytes()[:-100])
    check = verify_ledger(ledger.path)
    assert (check.first_bad, check.torn, check.head.lines) == (12, True, 11)
    assert "line 12 is torn" in check.reason
    with pytest.raises(IntegrityError, match="line 12 is torn"):
        ledger.entries()


def test_g54_append_after_half_a_line_files_the_fragment_and_keeps_every_whole_line(tmp_path):
    ledger = _ledger(tmp_path)
    whole = ledger.path.read_bytes()
    ledger.path.write_bytes(whole[:-100])
    fragment = whole[:-100].split(b"\n")[-1]
    ledger.append("after", {})
    check = verify_ledger(ledger.path)
    assert (check.ok, check.lines, check.repairs) == (True, 13, (12,))
    assert _kinds(ledger) == ["note"] * 11 + ["ledger.repaired", "after"]
    assert ledger.entries()[11].data == {
        "line": 12,
        "bytes": len(fragment),
        "fragment_hex": fragment.hex(),
        "fragment_sha256": sha256_bytes(fragment),
    }


def test_g54_repair_cannot_pass_for_the_line_an_anchor_saw(tmp_path):
    ledger = _ledger(tmp_path)
    anchor = ledger.head()
    ledger.path.write_bytes(ledger.path.read_bytes()[:-100])
    ledger.append("after", {})
    assert not verify_ledger(ledger.path, anchor).ok


def test_g54_long_fragment_keeps_four_kib_and_the_hash_of_all(tmp_path):
    ledger = _ledger(tmp_path, lines=1)
    with ledger.path.open("ab") as stream:
        stream.write(b"\x00" * 10_000)
    ledger.append("after", {})
    data = ledger.entries()[1].data
    assert data["fragment_hex"] == "00" * 4096
    assert (data["bytes"], data["fragment_sha256"]) == (10_000, sha256_bytes(b"\x00" * 10_000))


def test_g54_fragment_of_the_very_first_line_becomes_line_one(tmp_path):
    ledger = Ledger(tmp_path / "ledger.jsonl")
    ledger.path.write_bytes(b'{"data":')
    ledger.append("note", {})
    assert _kinds(ledger) == ["ledger.repaired", "note"]


@given(cut=st.integers(1, 300))
@settings(max_examples=40, deadline=None)
def test_g54_truncation_anywhere_then_append_keeps_all_whole_lines(tmp_path_factory, cut):
    ledger = _ledger(tmp_path_factory.mktemp("cut"), lines=3)
    content = ledger.path.read_bytes()[:-cut]
    ledger.path.write_bytes(content)
    ledger.append("after", {})
    assert verify_ledger(ledger.path).ok
    assert ledger.path.read_bytes().startswith(content[: content.rfind(b"\n") + 1])


def test_g54_repair_killed_before_its_rename_loses_no_whole_line(tmp_path, monkeypatch):
    ledger = _ledger(tmp_path, lines=3)
    torn = ledger.path.read_bytes()[:-50]
    ledger.path.write_bytes(torn)
    monkeypatch.setattr(ledger_module, "write_bytes", _fail(KeyboardInterrupt()))
    with pytest.raises(KeyboardInterrupt):
        ledger.append("after", {})
    assert ledger.path.read_bytes() == torn


def _fail(error):
    def fail(*args, **kwargs):
        raise error

    return fail


def test_append_to_a_ledger_broken_in_the_middle_is_refused_and_names_the_line(tmp_path):
    ledger = _ledger(tmp_path)
    broken = ledger.path.read_bytes().replace(b'"number":4', b'"number":5')
    ledger.path.write_bytes(broken)
    with pytest.raises(IntegrityError, match="line 5 hashes to"):
        ledger.append("after", {})
    assert ledger.path.read_bytes() == broken


def test_append_to_a_ledger_broken_and_torn_repairs_neither(tmp_path):
    ledger = _ledger(tmp_path)
    broken = ledger.path.read_bytes().replace(b'"number":4', b'"number":5')[:-9]
    ledger.path.write_bytes(broken)
    with pytest.raises(IntegrityError, match="line 5"):
        ledger.append("after", {})
    assert ledger.path.read_bytes() == broken


def test_append_to_an_edited_last_line_is_refused(tmp_path):
    ledger = _ledger(tmp_path, lines=2)
    ledger.path.write_bytes(ledger.path.read_bytes().replace(b'"number":1', b'"number":7'))
    with pytest.raises(IntegrityError, match="line 2"):
        ledger.append("after", {})


# A clock that goes backwards.


def test_clock_gone_backwards_is_told_in_an_entry_of_its_own(tmp_path):
    ledger = _ledger(tmp_path, lines=1)
    earlier = "2025-12-31T23:59:59.000000Z"
    Ledger(ledger.path, lambda: earlier).append("note", {})
    told, entry = ledger.entries()[1:]
    assert (told.kind, told.data) == ("clock.backwards", {"before": _TIME, "now": earlier})
    assert entry.time == earlier
    check = verify_ledger(ledger.path)
    assert (check.ok, check.clock_backwards) == (True, (2,))


def test_clock_gone_backwards_is_told_once_not_at_every_append(tmp_path):
    ledger = _ledger(tmp_path, lines=1)
    late = Ledger(ledger.path, lambda: "2025-12-31T23:59:59.000000Z")
    late.append("note", {})
    late.append("note", {})
    assert _kinds(ledger) == ["note", "clock.backwards", "note", "note"]


def test_clock_gone_backwards_across_a_torn_line_tells_both(tmp_path):
    ledger = _ledger(tmp_path, lines=2)
    ledger.path.write_bytes(ledger.path.read_bytes()[:-9])
    Ledger(ledger.path, lambda: "2025-12-31T23:59:59.000000Z").append("note", {})
    assert _kinds(ledger) == ["note", "clock.backwards", "ledger.repaired", "note"]


# Disks and folders that refuse.


@pytest.mark.parametrize("existing", [0, 3])
def test_append_whose_fsync_fails_leaves_the_ledger_as_it_was(tmp_path, monkeypatch, existing):
    ledger = _ledger(tmp_path, lines=existing)
    before = ledger.path.read_bytes() if existing else None
    monkeypatch.setattr(os, "fsync", _fail(OSError(errno.ENOSPC, "No space left on device")))
    with pytest.raises(DiskSpaceError, match="free space there"):
        ledger.append("note", {})
    assert (ledger.path.read_bytes() if ledger.path.exists() else None) == before


_LIMITED = """
import resource, sys
from pathlib import Path
from leadline.core.ledger import Ledger
from leadline.core.errors import DiskSpaceError
limit = int(sys.argv[2])
resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))
try:
    Ledger(Path(sys.argv[1])).append("note", {"text": "x" * 500})
except DiskSpaceError as error:
    print(error)
"""


def test_append_cut_short_by_the_disk_takes_its_partial_line_away(tmp_path):
    ledger = _ledger(tmp_path, lines=3)
    before = ledger.path.read_bytes()
    # The limit falls inside the new line, so the kernel writes a part of it and then refuses.
    command = [sys.executable, "-c", _LIMITED, str(ledger.path), str(len(before) + 200)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    assert "largest file" in done.stdout
    assert ledger.path.read_bytes() == before
    assert verify_ledger(ledger.path, ledger.head()).ok
    assert resource.getrlimit(resource.RLIMIT_FSIZE)[0] == resource.RLIM_INFINITY


def test_append_that_cannot_even_clean_up_says_so_and_the_next_one_repairs(tmp_path, monkeypatch):
    ledger = _ledger(tmp_path, lines=2)
    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", _fail(OSError(errno.EIO, "Input/output error")))
        patch.setattr(ledger_module, "_take_back", _fail(OSError(errno.EIO, "gone for good")))
        with pytest.raises(LeadlineError) as caught:
            ledger.append("note", {})
    assert "gone for good" in caught.value.__cause__.__notes__[0]
    ledger.append("after", {})
    assert verify_ledger(ledger.path).ok


_FOREVER = """
import sys
from pathlib import Path
from leadline.core.ledger import Ledger
while True:
    print(Ledger(Path(sys.argv[1])).append("note", {"text": "x" * 300}).seq, flush=True)
"""


@pytest.mark.parametrize("after_lines", [1, 7, 20])
def test_append_killed_at_any_moment_loses_no_line_it_reported(tmp_path, after_lines):
    path = tmp_path / "ledger.jsonl"
    command = [sys.executable, "-c", _FOREVER, str(path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as writer:
        for _ in range(after_lines):
            writer.stdout.readline()
        writer.kill()
        reported = after_lines + len(writer.stdout.read().splitlines())
    Ledger(path).append("after", {})
    check = verify_ledger(path)
    assert check.ok
    assert Ledger(path).entries()[reported - 1].kind == "note"


def test_append_below_a_file_used_as_a_folder_is_one_sentence(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(LeadlineError, match="cannot write"):
        Ledger(tmp_path / "file" / "ledger.jsonl").append("note", {})


def test_append_while_another_holds_the_lock_gives_up_with_a_sentence(tmp_path, monkeypatch):
    monkeypatch.setattr(ledger_module, "_LOCK_TIMEOUT_S", 0.0)
    ledger = _ledger(tmp_path, lines=1)
    with (
        ledger_module.FileLock(f"{ledger.path}.lock"),
        pytest.raises(LeadlineError, match="locked by another process"),
    ):
        ledger.append("note", {})


_FIFTY = """
import sys
from pathlib import Path
from leadline.core.ledger import Ledger
print("ready", flush=True)
sys.stdin.readline()
for number in range(50):
    Ledger(Path(sys.argv[1])).append(sys.argv[2], {"number": number})
"""


def test_append_by_two_processes_at_once_makes_one_chain_of_a_hundred(tmp_path):
    path = tmp_path / "ledger.jsonl"
    commands = [[sys.executable, "-c", _FIFTY, str(path), who] for who in "ab"]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    writers = [subprocess.Popen(command, **pipes) for command in commands]
    assert [writer.stdout.readline() for writer in writers] == [b"ready\n"] * 2
    for writer in writers:
        writer.stdin.write(b"go\n")
        writer.stdin.flush()
    for writer in writers:
        writer.communicate(timeout=120)
    assert [writer.returncode for writer in writers] == [0, 0]
    check = verify_ledger(path)
    assert (check.ok, check.lines) == (True, 100)
    entries = Ledger(path).entries()
    for who in "ab":
        assert [e.data["number"] for e in entries if e.kind == who] == list(range(50))
