import json

import pytest

from leadline.core.canonical import sha256_file
from leadline.core.errors import IntegrityError, LeadlineError
from leadline.core.evidence import EvidenceStore


@pytest.fixture
def store(tmp_path):
    return EvidenceStore(tmp_path / "run")


def _record(store, name="twin", *, green=True, reason="", inputs="abc", **data):
    return store.record(name, green=green, reason=reason, inputs=inputs, data=data or {"x": 0.5})


def test_evidence_recorded_is_read_back_whole(store):
    written = _record(store, worst_delta=0.25)
    assert store.read() == {"twin": written}


def test_evidence_hash_is_that_of_its_file_and_of_the_ledger_line(store):
    written = _record(store)
    (entry,) = store.ledger.entries()
    assert written.sha256 == sha256_file(store.path("twin")) == entry.data["sha256"]


def test_evidence_line_tells_verdict_reason_and_inputs(store):
    _record(store, green=False, reason="too far", inputs="def")
    (entry,) = store.ledger.entries()
    assert (entry.kind, entry.data["verdict"]) == ("evidence", "red")
    assert (entry.data["reason"], entry.data["inputs"]) == ("too far", "def")


def test_store_without_a_ledger_holds_nothing(store):
    assert store.read() == {}


@pytest.mark.parametrize(
    "edit",
    [
        lambda data: data.replace(b"0.5", b"0.4"),
        lambda data: data.replace(b'"green": true', b'"green": false'),
        lambda data: data + b"\n",
        lambda data: data[: len(data) // 2],
        lambda data: b"",
        lambda data: json.dumps(json.loads(data)).encode(),
    ],
    ids=["value", "verdict", "trailing", "half", "empty", "respaced"],
)
def test_evidence_with_other_bytes_is_red_and_told(store, edit):
    _record(store)
    path = store.path("twin")
    path.write_bytes(edit(path.read_bytes()))
    found = store.read()["twin"]
    assert not found.green
    assert "twin.json was changed" in found.reason


def test_evidence_deleted_is_red_and_told(store):
    _record(store)
    store.path("twin").unlink()
    found = store.read()["twin"]
    assert not found.green
    assert "twin.json is gone" in found.reason


def test_evidence_that_cannot_be_read_is_red_and_told(store):
    _record(store)
    store.path("twin").unlink()
    store.path("twin").mkdir()
    found = store.read()["twin"]
    assert not found.green
    assert "cannot be read" in found.reason


def test_evidence_killed_before_its_ledger_line_counts_as_missing(store, monkeypatch):
    def die(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(store.ledger, "append", die)
    with pytest.raises(KeyboardInterrupt):
        _record(store)
    assert store.path("twin").exists()
    assert store.read() == {}


def test_evidence_file_nobody_recorded_counts_as_missing(store):
    _record(store)
    store.path("choice").write_bytes(store.path("twin").read_bytes())
    assert set(store.read()) == {"twin"}


def test_evidence_recorded_again_supersedes_the_first(store):
    _record(store, green=False, reason="bad", x=1)
    second = _record(store, x=2)
    assert store.read() == {"twin": second}


def test_evidence_superseded_and_put_back_is_red(store):
    _record(store, x=1)
    old = store.path("twin").read_bytes()
    _record(store, x=2)
    store.path("twin").write_bytes(old)
    assert not store.read()["twin"].green


def test_evidence_under_an_edited_ledger_is_refused(store):
    _record(store)
    path = store.ledger.path
    path.write_bytes(path.read_bytes().replace(b'"green"', b'"red"'))
    with pytest.raises(IntegrityError):
        store.read()


def test_evidence_with_nan_is_refused_and_leaves_nothing(store):
    with pytest.raises(ValueError, match="not JSON compliant"):
        _record(store, x=float("nan"))
    assert store.read() == {}
    assert not store.path("twin").exists()


def test_evidence_without_room_leaves_no_file_and_no_line(store, full_disk):
    with pytest.raises(LeadlineError, match="disk is full"):
        _record(store)
    assert not store.path("twin").exists()
    assert store.read() == {}


def test_reusable_evidence_is_green_and_of_the_same_inputs(store):
    written = _record(store, inputs="same")
    assert store.reusable("twin", "same") == written


@pytest.mark.parametrize(
    ("name", "green", "inputs"),
    [("twin", True, "other"), ("twin", False, "same"), ("choice", True, "same")],
    ids=["other inputs", "red", "other name"],
)
def test_evidence_of_anything_else_is_not_reused(store, name, green, inputs):
    _record(store, name, green=green, reason="" if green else "bad", inputs=inputs)
    assert store.reusable("twin", "same") is None


def test_evidence_edited_is_not_reused(store):
    _record(store, inputs="same")
    store.path("twin").write_bytes(b"{}")
    assert store.reusable("twin", "same") is None
