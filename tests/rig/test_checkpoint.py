"""A checkpoint's folder: index and shards must tell the same story."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from leadline.core.errors import IntegrityError, LeadlineError, UsageError
from leadline.rig.checkpoint import Checkpoint

from .shard_files import read_index, write_checkpoint, write_index, write_shard

FIRST = {"a.0.weight": (8, 16), "a.1.weight": (8, 16)}
SECOND = {"a.2.weight": (8, 16), "a.10.weight": (8, 16)}
THIRD = {"head.weight": (4, 16)}
SHARD_2 = "model-00002-of-00003.safetensors"
SHARD_3 = "model-00003-of-00003.safetensors"


@pytest.fixture
def sharded(tmp_path: Path) -> Path:
    return write_checkpoint(tmp_path / "model", FIRST, SECOND, THIRD)


def test_sharded_checkpoint_lists_every_tensor_once(sharded: Path) -> None:
    checkpoint = Checkpoint.open(sharded)
    assert {n: e.shape for n, e in checkpoint.tensors.items()} == {**FIRST, **SECOND, **THIRD}
    assert checkpoint.tensors["a.10.weight"].shard == SHARD_2
    assert checkpoint.shards[SHARD_2] == sharded / SHARD_2
    assert checkpoint.total_bytes == 4 * 256 + 128


def test_single_file_checkpoint_opens(tmp_path: Path) -> None:
    checkpoint = Checkpoint.open(write_checkpoint(tmp_path, FIRST))
    assert list(checkpoint.shards) == ["model.safetensors"]
    assert checkpoint.total_bytes == 512


def test_shards_that_are_links_open(sharded: Path, tmp_path: Path) -> None:
    blobs = tmp_path / "blobs"
    blobs.mkdir()
    for shard in sharded.glob("*.safetensors"):
        shutil.move(shard, blobs / shard.name)
        shard.symlink_to(blobs / shard.name)
    assert Checkpoint.open(sharded).total_bytes == 4 * 256 + 128


def test_t43_cut_shard_is_refused_at_start(sharded: Path) -> None:
    path = sharded / SHARD_2
    whole = path.stat().st_size
    os.truncate(path, whole - 100)
    with pytest.raises(IntegrityError, match=SHARD_2) as caught:
        Checkpoint.open(sharded)
    assert f"{whole:,}" in str(caught.value)
    assert f"{whole - 100:,}" in str(caught.value)


def test_t45_missing_shard_is_refused_with_its_first_tensors(sharded: Path) -> None:
    (sharded / SHARD_2).unlink()
    with pytest.raises(IntegrityError, match=SHARD_2) as caught:
        Checkpoint.open(sharded)
    assert "a.2.weight, a.10.weight" in str(caught.value)


def test_t46_tensor_in_another_shard_than_the_index_says_is_refused(sharded: Path) -> None:
    write_index(sharded, {**read_index(sharded), "a.2.weight": SHARD_3})
    with pytest.raises(IntegrityError, match=r"a\.2\.weight") as caught:
        Checkpoint.open(sharded)
    assert SHARD_3 in str(caught.value)
    assert f"it is in {SHARD_2}" in str(caught.value)


def test_t46_tensor_that_no_shard_holds_is_refused(sharded: Path) -> None:
    write_index(sharded, {**read_index(sharded), "a.3.weight": SHARD_2})
    with pytest.raises(IntegrityError, match=r"a\.3\.weight.*no shard it names has it"):
        Checkpoint.open(sharded)


def test_t46_tensor_that_the_index_leaves_out_is_reported(sharded: Path) -> None:
    index = read_index(sharded)
    del index["a.10.weight"], index["a.0.weight"]
    write_index(sharded, {**index, "a.3.weight": SHARD_2})
    with pytest.raises(IntegrityError, match="2 tensors in the shards are not in it") as caught:
        Checkpoint.open(sharded)
    assert "first a.0.weight" in str(caught.value)
    assert "1 tensors are not in the shard it names, first a.3.weight" in str(caught.value)


def test_tensor_in_two_shards_is_refused(sharded: Path) -> None:
    write_shard(sharded / SHARD_3, {**THIRD, "a.0.weight": (8, 16)})
    with pytest.raises(IntegrityError, match=r"a\.0\.weight is in .* and in"):
        Checkpoint.open(sharded)


@pytest.mark.parametrize("shard", ["../x.safetensors", "/x", "", "..", "a\\b", 3, None])
def test_index_that_leads_out_of_the_folder_is_refused(sharded: Path, shard: object) -> None:
    write_index(sharded, {**read_index(sharded), "a.2.weight": shard})
    with pytest.raises(IntegrityError, match="wanted a file name inside the folder"):
        Checkpoint.open(sharded)


@pytest.mark.parametrize("text", ["", "[]", "{", '{"weight_map": []}', '{"weight_map": {}}', "{}"])
def test_index_that_is_none_is_refused(sharded: Path, text: str) -> None:
    (sharded / "model.safetensors.index.json").write_text(text)
    with pytest.raises(IntegrityError, match=r"index\.json"):
        Checkpoint.open(sharded)


def test_single_file_beside_an_index_is_refused(sharded: Path) -> None:
    write_shard(sharded / "model.safetensors", FIRST)
    with pytest.raises(UsageError, match="left over"):
        Checkpoint.open(sharded)


def test_folder_without_weights_names_what_is_there(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, FIRST)
    (tmp_path / "model.safetensors").rename(tmp_path / "weights.safetensors")
    with pytest.raises(UsageError, match=r"found weights\.safetensors"):
        Checkpoint.open(tmp_path)


@pytest.mark.parametrize("kind", ["absent", "file", "empty"])
def test_what_is_no_checkpoint_is_refused(tmp_path: Path, kind: str) -> None:
    path = tmp_path / "model"
    if kind == "file":
        path.write_text("{}")
    elif kind == "empty":
        path.mkdir()
    with pytest.raises(UsageError, match="give the folder"):
        Checkpoint.open(path)


@pytest.mark.parametrize("text", ["", "[]", "{"])
def test_configuration_that_is_no_object_is_refused(sharded: Path, text: str) -> None:
    (sharded / "config.json").write_text(text)
    with pytest.raises(IntegrityError, match=r"config\.json"):
        Checkpoint.open(sharded)


@pytest.mark.parametrize("field", ["quantization_config", "compression_config"])
@pytest.mark.parametrize("nested", [False, True])
def test_quantised_checkpoint_is_refused(tmp_path: Path, field: str, nested: bool) -> None:
    config = {field: {"quant_method": "mxfp4"}}
    write_checkpoint(tmp_path, FIRST, config={"text_config": config} if nested else config)
    with pytest.raises(UsageError, match="mxfp4"):
        Checkpoint.open(tmp_path)


def test_empty_quantisation_field_is_none(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, FIRST, config={"quantization_config": None})
    assert Checkpoint.open(tmp_path).tensors


def test_unreadable_shard_is_named(sharded: Path) -> None:
    shutil.rmtree(sharded / SHARD_2, ignore_errors=True)
    (sharded / SHARD_2).unlink()
    (sharded / SHARD_2).symlink_to(SHARD_2)
    with pytest.raises(LeadlineError, match=SHARD_2):
        Checkpoint.open(sharded)


def test_digest_does_not_depend_on_where_the_folder_lies(sharded: Path, tmp_path: Path) -> None:
    copy = Path(shutil.copytree(sharded, tmp_path / "copy"))
    assert Checkpoint.open(copy).digest == Checkpoint.open(sharded).digest


@pytest.mark.parametrize("change", ["config", "first byte", "last byte", "shape"])
def test_digest_changes_with_what_it_stands_for(sharded: Path, change: str) -> None:
    before = Checkpoint.open(sharded).digest
    path = sharded / SHARD_2
    data = bytearray(path.read_bytes())
    if change == "config":
        (sharded / "config.json").write_text(json.dumps({"model_type": "qwen3"}))
    elif change == "shape":
        write_shard(path, {"a.2.weight": (16, 8), "a.10.weight": (8, 16)})
    else:
        at = -1 if change == "last byte" else Checkpoint.open(sharded).tensors["a.2.weight"].begin
        data[at] ^= 1
        path.write_bytes(data)
    assert Checkpoint.open(sharded).digest != before


def test_opening_a_checkpoint_does_not_import_torch() -> None:
    code = "import sys, leadline.rig.checkpoint; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
