"""The hash gate: no probe reads a byte that was not verified first."""

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from leadline.core.errors import ProbeError, UsageError
from leadline.data import load_manifest, pack_text
from leadline.gate.lock import lock_problems
from leadline.gate.runner import GateEvents, run_gate
from leadline.pack.build import build_pack

from .double import GateDouble

POINTER = (
    b"version https://git-lfs.github.com/spec/v1\n"
    b"oid sha256:4d7a214614ab2935c943f9e0ff69d22eadbb8f32b1258daaa5e2ca24d17e2393\nsize 12345\n"
)


@pytest.fixture
def own(gate: GateDouble, tiny_shards: Path) -> GateDouble:
    """The gate over shards that a test may damage."""
    shutil.copytree(tiny_shards, gate.folder / "shards")
    gate.tables["data"]["shards"] = "shards"
    return gate


@pytest.fixture
def packed(gate: GateDouble, tiny_shards: Path) -> GateDouble:
    """The gate over a tarball."""
    build_pack(tiny_shards, gate.folder / "packs", "corpus")
    gate.tables["data"] = {"pack": "packs/corpus.tar", "epochs": 1000}
    return gate


@pytest.fixture
def text(gate: GateDouble) -> GateDouble:
    """The gate over a folder of text."""
    for number in range(30):
        path = gate.folder / "text" / f"{number}.txt"
        path.parent.mkdir(exist_ok=True)
        path.write_text(f"{number} fathoms and no bottom, " * 60, encoding="utf-8")
    gate.tables["data"] = {
        "text": "text",
        "tokenizer": "bytes",
        "eval_fraction": "0.2",
        "epochs": 1000,
    }
    return gate


def other_shards(folder: Path) -> Path:
    """Sound shards of another text."""
    prose = folder / "other-text"
    for number in range(30):
        prose.mkdir(exist_ok=True)
        words = f"{number} marks and a deep, " * 60
        (prose / f"{number}.txt").write_text(words, encoding="utf-8")
    pack_text(prose, folder / "other", tokenizer="bytes", eval_fraction="0.2")
    return folder / "other"


def shard(folder: Path) -> Path:
    return next((folder / "shards" / "train").glob("*.bin"))


def truncate(folder: Path) -> None:
    path = shard(folder)
    path.write_bytes(path.read_bytes()[:-2])


def flip(folder: Path) -> None:
    path = shard(folder)
    content = bytearray(path.read_bytes())
    content[500] ^= 4
    path.write_bytes(content)


def point_to_lfs(folder: Path) -> None:
    shard(folder).write_bytes(POINTER)


def remove(folder: Path) -> None:
    shard(folder).unlink()


def add_stranger(folder: Path) -> None:
    (folder / "shards" / "train" / "extra.bin").write_bytes(b"12")


@pytest.mark.parametrize("damage", [truncate, flip, point_to_lfs, remove, add_stranger])
def test_damaged_shards_are_red_before_any_measurement(
    own: GateDouble, damage: Callable[[Path], None]
) -> None:
    damage(own.folder)
    outcome = own.run()
    assert outcome.status.red == ("hash_gate",)
    assert "train/" in own.store.read()["pack"].reason
    assert own.probes.measured == []


def test_repaired_shards_let_the_gate_go_on(own: GateDouble) -> None:
    content = shard(own.folder).read_bytes()
    truncate(own.folder)
    own.run()
    shard(own.folder).write_bytes(content)
    assert own.run().status.green


def test_shards_damaged_between_two_attempts_are_red(own: GateDouble) -> None:
    del own.tables["disposition"]
    own.run()
    flip(own.folder)
    own.probes.calls.clear()
    assert "hash_gate" in own.run().status.red
    assert own.probes.measured == []


def test_probes_of_a_moved_configuration_read_the_shards_that_were_verified_there(
    own: GateDouble,
) -> None:
    """The old folder's shards are the same by hash, and nobody has looked at them since."""
    asked: list[str] = []

    def answer(request: Any) -> dict[str, Any]:
        asked.append(request.subject.shards)
        return own.probes.twin

    own.probes.serves["twin"] = answer
    own.probes.raises["twin"] = ProbeError("the twin process was killed")
    own.run()
    del own.probes.raises["twin"]
    moved = own.folder / "moved"
    moved.mkdir()
    for name in ("shards", "model.py", "gate.toml"):
        (own.folder / name).rename(moved / name)
    run_gate(moved / "gate.toml", own.out, GateEvents())
    assert asked == [str(moved / "shards")]


def test_negative_control_is_on_the_record(own: GateDouble) -> None:
    own.run()
    control = own.store.read()["pack"].data["negative_control"]
    assert control["found"] is True
    assert "sha256" in control["said"]


def test_blind_checker_turns_the_gate_red(own: GateDouble, monkeypatch: pytest.MonkeyPatch) -> None:
    from leadline.pack.control import negative_control

    blind = {**(negative_control.__kwdefaults__ or {}), "checker": lambda *_: None}
    monkeypatch.setattr(negative_control, "__kwdefaults__", blind)
    outcome = own.run()
    assert outcome.status.red == ("hash_gate",)
    assert "the checker is blind" in own.store.read()["pack"].reason


def test_pack_is_verified_and_unpacked_into_the_run(packed: GateDouble) -> None:
    assert packed.run().status.green
    evidence = packed.store.read()["pack"].data
    assert evidence["shards_dir"].startswith("data")
    assert len(evidence["tarball_sha256"]) == 64
    assert (packed.out / evidence["shards_dir"] / "manifest.json").is_file()
    assert lock_problems(packed.out, deep=True) == []


def test_tampered_pack_is_red_and_nothing_is_unpacked(packed: GateDouble) -> None:
    path = packed.folder / "packs" / "corpus.tar"
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)
    outcome = packed.run()
    assert outcome.status.red == ("hash_gate",)
    assert "is not whole" in packed.store.read()["pack"].reason
    assert not (packed.out / "data").exists()


def test_pack_without_its_manifest_is_red(packed: GateDouble) -> None:
    (packed.folder / "packs" / "corpus.manifest.json").unlink()
    packed.run()
    assert "has no manifest" in packed.store.read()["pack"].reason


def test_resumed_gate_does_not_unpack_again(packed: GateDouble) -> None:
    del packed.tables["disposition"]
    packed.run()
    before = (packed.out / "data").stat().st_ino
    packed.tables["disposition"] = {"next": "continue"}
    assert packed.run().status.green
    assert (packed.out / "data").stat().st_ino == before


def test_resumed_gate_whose_pack_is_gone_is_refused_and_keeps_its_data(packed: GateDouble) -> None:
    del packed.tables["disposition"]
    packed.run()
    shutil.rmtree(packed.folder / "packs")
    with pytest.raises(UsageError, match="there is no pack at"):
        packed.run()
    assert (packed.out / "data").is_dir()


def test_pack_of_other_content_under_the_same_name_is_brought_in(packed: GateDouble) -> None:
    del packed.tables["disposition"]
    packed.run()
    first = packed.store.read()["pack"].data
    shutil.rmtree(packed.folder / "packs")
    build_pack(other_shards(packed.folder), packed.folder / "packs", "corpus")
    packed.probes.calls.clear()
    packed.run()
    second = packed.store.read()["pack"].data
    assert second["manifest_sha256"] != first["manifest_sha256"]
    assert packed.probes.measured == ["twin", "probe-P1", "probe-P2", "probe-P3"]


def test_pack_moved_elsewhere_is_not_unpacked_again(packed: GateDouble) -> None:
    del packed.tables["disposition"]
    packed.run()
    before = (packed.out / "data").stat().st_ino
    (packed.folder / "packs").rename(packed.folder / "moved")
    packed.tables["data"]["pack"] = "moved/corpus.tar"
    packed.run()
    assert (packed.out / "data").stat().st_ino == before


def test_g38_data_swapped_with_a_manifest_of_its_own_is_unpacked_anew(packed: GateDouble) -> None:
    del packed.tables["disposition"]
    packed.run()
    recorded = packed.store.read()["pack"].data["manifest_sha256"]
    root = packed.out / packed.store.read()["pack"].data["shards_dir"]
    shutil.rmtree(root)
    shutil.copytree(other_shards(packed.folder), root)
    packed.tables["disposition"] = {"next": "continue"}
    assert packed.run().status.green
    assert load_manifest(root).sha256 == recorded == packed.lock()["manifest_sha256"]


def test_unpacked_data_that_was_damaged_is_brought_in_again(packed: GateDouble) -> None:
    del packed.tables["disposition"]
    packed.run()
    damaged = next((packed.out / "data").rglob("train/*.bin"))
    damaged.write_bytes(b"")
    assert "hash_gate" in packed.run().status.red
    packed.tables["disposition"] = {"next": "continue"}
    assert packed.run().status.green


def test_text_goes_through_shards_and_a_pack(text: GateDouble) -> None:
    assert text.run().status.green
    data = text.store.read()["pack"].data
    assert (data["vocab_size"], data["secrets_found"]) == (257, 0)
    assert (text.out / "pack" / "data.tar").is_file()
    assert lock_problems(text.out, deep=True) == []


def test_text_changed_between_two_attempts_is_packed_anew(text: GateDouble) -> None:
    del text.tables["disposition"]
    text.run()
    first = text.store.read()["pack"].data["manifest_sha256"]
    (text.folder / "text" / "7.txt").write_text("deeper than that, " * 60, encoding="utf-8")
    text.probes.calls.clear()
    text.run()
    assert text.store.read()["pack"].data["manifest_sha256"] != first
    assert text.probes.measured == ["twin", "probe-P1", "probe-P2", "probe-P3"]


def test_text_reached_by_another_path_is_not_packed_anew(text: GateDouble) -> None:
    del text.tables["disposition"]
    text.run()
    before = (text.out / "data").stat().st_ino
    (text.folder / "text").rename(text.folder / "prose")
    text.tables["data"] |= {"text": "prose", "epochs": 999}
    text.run()
    assert (text.out / "data").stat().st_ino == before


def test_changed_tokenizer_file_packs_the_text_anew(text: GateDouble) -> None:
    for spelling in ("first", "second"):
        shards = text.folder / spelling
        pack_text(text.folder / "text", shards, vocab_size=257 if spelling == "first" else 300)
    path = text.folder / "tokenizer.json"
    text.tables["data"]["tokenizer"] = "tokenizer.json"
    del text.tables["disposition"]
    sizes = []
    for spelling in ("first", "second"):
        shutil.copy(text.folder / spelling / "tokenizer.json", path)
        text.run()
        sizes.append(text.store.read()["pack"].data["vocab_size"])
    assert sizes[0] < sizes[1]


def test_shards_that_were_not_packed_here_are_not_called_free_of_secrets(own: GateDouble) -> None:
    own.run()
    assert own.store.read()["pack"].data["secrets_found"] is None


def test_g35_corpus_smaller_than_one_batch_is_red_before_the_run(own: GateDouble) -> None:
    own.tables["sweep"]["points"][1] |= {"micro_batch": 64, "seq_len": 4096}
    outcome = own.run()
    assert outcome.status.red == ("hash_gate",)
    reason = own.store.read()["pack"].reason
    assert "windows of 4096, fewer than one batch of 64" in reason
    assert own.probes.measured == []


def test_eval_split_smaller_than_one_batch_is_red_before_the_run(own: GateDouble) -> None:
    own.tables["sweep"]["points"][1]["eval_batch"] = 2000
    own.run()
    assert "the eval split has" in own.store.read()["pack"].reason


def test_g38_text_folder_with_an_lfs_pointer_is_red(text: GateDouble) -> None:
    (text.folder / "text" / "big.txt").write_bytes(POINTER)
    outcome = text.run()
    assert outcome.status.red == ("hash_gate",)
    assert "git-lfs" in text.store.read()["pack"].reason
