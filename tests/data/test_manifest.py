"""The manifest: canonical bytes, and a reader that takes nothing on trust."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from leadline.core.canonical import sha256_file
from leadline.core.errors import DataError
from leadline.data.manifest import load_manifest

MakeShards = Callable[..., Path]


def _edit(root: Path, *keys: str | int, value: object) -> None:
    path = root / "manifest.json"
    document = json.loads(path.read_bytes())
    place = document
    for key in keys[:-1]:
        place = place[key]
    place[keys[-1]] = value
    # Canonical again, so that only the value is at fault.
    text = json.dumps(document, sort_keys=True, separators=(",", ":"), ensure_ascii=False)
    path.write_bytes(text.encode())


def test_manifest_survives_a_round_trip(make_shards: MakeShards) -> None:
    root = make_shards([[1, 2, 3]])
    assert load_manifest(root).to_bytes() == (root / "manifest.json").read_bytes()


def test_manifest_sha256_is_that_of_its_file(make_shards: MakeShards) -> None:
    root = make_shards([[1, 2, 3]])
    assert load_manifest(root).sha256 == sha256_file(root / "manifest.json")


def test_manifest_has_the_documented_layout(make_shards: MakeShards) -> None:
    value = json.loads((make_shards([[1, 2, 3]]) / "manifest.json").read_bytes())
    assert value["schema"] == 1
    assert sorted(value["tokenizer"]) == ["end_of_text", "kind", "sha256", "vocab_size"]
    assert sorted(value["splits"]) == ["eval", "train"]
    assert sorted(value["splits"]["train"]["shards"][0]) == [
        "bytes",
        "documents",
        "index_bytes",
        "index_sha256",
        "max_id",
        "path",
        "sha256",
        "tokens",
    ]


@pytest.mark.parametrize(
    ("keys", "value"),
    [
        (("schema",), 2),
        (("schema",), "1"),
        (("dtype",), "int64"),
        (("seed",), -1),
        (("seed",), 1.5),
        (("eval_fraction",), 0.02),
        (("request",), {"x": [1]}),
        (("request",), []),
        (("tokenizer",), {}),
        (("tokenizer", "vocab_size"), "many"),
        (("tokenizer", "extra"), 1),
        (("splits", "train"), None),
        (("splits", "train", "tokens"), True),
        (("splits", "train", "shards"), [{}]),
        (("splits", "train", "shards", 0, "tokens"), -4),
        (("splits", "train", "shards", 0, "path"), 7),
        (("source", "skipped"), {"empty": -1}),
    ],
)
def test_manifest_with_a_wrong_value_is_refused(
    make_shards: MakeShards, keys: tuple[str | int, ...], value: object
) -> None:
    root = make_shards([[1, 2, 3]])
    _edit(root, *keys, value=value)
    with pytest.raises(DataError, match=r"manifest\.json is not a shards manifest of schema 1"):
        load_manifest(root)


@pytest.mark.parametrize("data", [b"", b"{", b"[]", b"null", b"\xff", b'{"schema": 1}'])
def test_manifest_that_is_no_manifest_is_refused(tmp_path: Path, data: bytes) -> None:
    (tmp_path / "manifest.json").write_bytes(data)
    with pytest.raises(DataError, match="not a shards manifest"):
        load_manifest(tmp_path)


def test_manifest_with_an_unknown_key_is_refused(make_shards: MakeShards) -> None:
    root = make_shards([[1, 2, 3]])
    _edit(root, "note", value="hello")
    with pytest.raises(DataError, match="rewritten after packing"):
        load_manifest(root)


def test_folder_without_manifest_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="leadline data pack"):
        load_manifest(tmp_path / "nowhere")


def test_unknown_split_is_refused(make_shards: MakeShards) -> None:
    with pytest.raises(DataError, match="no split 'test'; the shards have train and eval"):
        load_manifest(make_shards([[1, 2, 3]])).split("test")
