import json
import shutil

import numpy as np
import pytest

from leadline.core.errors import DataError, UsageError
from leadline.data import pack_text
from leadline.tap.token_files import read_array, read_shards

END_OF_TEXT = 256


@pytest.fixture(scope="module")
def packed(tmp_path_factory):
    """Shards of byte ids: twelve different documents, a small shard size, some held out."""
    root = tmp_path_factory.mktemp("packed")
    (root / "text").mkdir()
    for number in range(12):
        (root / "text" / f"{number:02d}.txt").write_text(f"lead {number} " * (number + 1))
    pack_text(
        root / "text", root / "shards", tokenizer="bytes", eval_fraction="0.2", shard_tokens=200
    )
    return root


@pytest.fixture
def shards(packed, tmp_path):
    """A copy that may be damaged."""
    return shutil.copytree(packed / "shards", tmp_path / "shards")


def texts(rows):
    return [bytes(ids[:-1].tolist()).decode() for _, ids in rows]


@pytest.mark.parametrize("dtype", ["int8", "uint16", ">i4", "int64", "uint64"])
def test_array_of_two_dimensions_is_a_document_a_row(tmp_path, dtype):
    np.save(tmp_path / "a.npy", np.array([[1, 2, 3], [4, 5, 6]], dtype=dtype))
    rows = [(origin, ids.tolist()) for origin, ids in read_array(tmp_path / "a.npy")]
    assert rows == [("a.npy[0]", [1, 2, 3]), ("a.npy[1]", [4, 5, 6])]


@pytest.mark.parametrize("ids", [[1, 2, 3], []])
def test_array_of_one_dimension_is_one_document(tmp_path, ids):
    np.save(tmp_path / "a.npy", np.array(ids, dtype=np.int32))
    assert [row.tolist() for _, row in read_array(tmp_path / "a.npy")] == [ids]


@pytest.mark.parametrize(
    ("value", "told"),
    [
        (np.zeros((2, 3)), "float64"),
        (np.zeros(3, dtype=np.float16), "float16"),
        (np.ones(3, dtype=bool), "bool"),
        (np.array(["a"]), "<U1"),
        (np.array([[1], [1, 2]], dtype=object), "Python objects"),
        (np.zeros((1, 2, 3), dtype=np.int32), r"\(1, 2, 3\)"),
        (np.array(3), r"\(\)"),
    ],
)
def test_array_of_other_than_one_or_two_dimensions_of_integers_is_refused(tmp_path, value, told):
    np.save(tmp_path / "a.npy", value)
    with pytest.raises(DataError, match=told):
        list(read_array(tmp_path / "a.npy"))


@pytest.mark.parametrize("kept_bytes", [0, 5, 100, 327])
def test_array_that_was_cut_is_refused(tmp_path, kept_bytes):
    path = tmp_path / "a.npy"
    np.save(path, np.arange(25, dtype=np.int64))
    path.write_bytes(path.read_bytes()[:kept_bytes])
    with pytest.raises(DataError, match=r"no whole \.npy"):
        list(read_array(path))


def test_shards_folder_gives_the_training_documents_with_their_closing_token(packed):
    rows = list(read_shards(packed / "shards"))
    written = {path.read_text() for path in (packed / "text").iterdir()}
    assert all(ids[-1] == END_OF_TEXT and (ids[:-1] < 256).all() for _, ids in rows)
    assert set(texts(rows)) < written
    assert len(rows) > 1


def test_shards_of_both_splits_named_give_every_document_once(packed):
    both = [*read_shards(packed / "shards" / "train"), *read_shards(packed / "shards" / "eval")]
    assert sorted(texts(both)) == sorted(path.read_text() for path in (packed / "text").iterdir())


def test_shards_files_one_by_one_give_what_their_folder_gives(packed):
    files = sorted((packed / "shards" / "train").glob("*.bin"))
    assert len(files) > 1
    one_by_one = [origin for path in files for origin, _ in read_shards(path)]
    assert one_by_one == [origin for origin, _ in read_shards(packed / "shards")]


@pytest.mark.parametrize("suffix", ["bin", "idx"])
def test_shard_with_a_changed_byte_is_refused(shards, suffix):
    path = shards / "train" / f"shard-00000.{suffix}"
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    with pytest.raises(DataError, match=rf"shard-00000\.{suffix}.* sha256 differs"):
        list(read_shards(shards))


def test_shard_that_was_cut_is_refused_with_its_size(shards):
    path = shards / "train" / "shard-00000.bin"
    path.write_bytes(path.read_bytes()[:10])
    with pytest.raises(DataError, match=r"\(10 bytes\)"):
        list(read_shards(path))


def test_shard_index_that_cuts_other_than_listed_is_refused(shards):
    manifest = json.loads((shards / "manifest.json").read_bytes())
    manifest["splits"]["train"]["shards"][0]["documents"] += 1
    text = json.dumps(manifest, sort_keys=True, separators=(",", ":"))
    (shards / "manifest.json").write_text(text)
    with pytest.raises(DataError, match="does not cut"):
        list(read_shards(shards))


def test_bin_file_without_a_manifest_is_refused(tmp_path):
    (tmp_path / "a.bin").write_bytes(b"\0\0")
    with pytest.raises(UsageError, match=r"no manifest\.json of token shards"):
        list(read_shards(tmp_path / "a.bin"))


def test_bin_file_that_the_manifest_does_not_list_is_refused(shards):
    path = shards / "train" / "mine.bin"
    path.write_bytes(b"\0\0")
    with pytest.raises(UsageError, match=r"lists no shard of .*mine\.bin"):
        list(read_shards(path))
