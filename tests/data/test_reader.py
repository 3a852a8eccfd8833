"""The door between training and held-out text, and windows across shards."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from leadline.core.canonical import canonical_bytes
from leadline.core.errors import DataError
from leadline.data.reader import open_split

MakeShards = Callable[..., Path]
TRAIN = "train/shard-00000.bin"
EVAL = "eval/shard-00000.bin"


def _list_shard(root: Path, split: str, **changes: object) -> None:
    path = root / "manifest.json"
    value = json.loads(path.read_bytes())
    value["splits"][split]["shards"][0].update(changes)
    path.write_bytes(canonical_bytes(value))


def test_train_opens_train_and_eval_opens_eval(make_shards: MakeShards) -> None:
    root = make_shards([[11, 12, 13]])
    assert open_split(root, "train").windows(np.array([0]), 4).tolist() == [[11, 12, 13, 0]]
    assert open_split(root, "eval").windows(np.array([0]), 3).tolist() == [[9, 8, 7]]


def test_train_shard_listed_under_eval_is_refused(make_shards: MakeShards) -> None:
    root = make_shards([[1, 2, 3]])
    _list_shard(root, "train", path=EVAL)
    with pytest.raises(DataError, match=r"outside .*train"):
        open_split(root, "train")


@pytest.mark.parametrize(
    "path", ["train/../eval/shard-00000.bin", "train/./../eval/shard-00000.bin"]
)
def test_train_shard_path_that_climbs_out_is_refused(make_shards: MakeShards, path: str) -> None:
    root = make_shards([[1, 2, 3]])
    _list_shard(root, "train", path=path)
    with pytest.raises(DataError, match="opens nothing but files of train/"):
        open_split(root, "train")


def test_train_shard_at_an_absolute_path_is_refused(make_shards: MakeShards) -> None:
    root = make_shards([[1, 2, 3]])
    _list_shard(root, "train", path=str(root / TRAIN))
    with pytest.raises(DataError, match="opens nothing but files of train/"):
        open_split(root, "train")


def test_link_from_train_into_eval_is_refused(make_shards: MakeShards) -> None:
    root = make_shards([[1, 2, 3]])
    (root / TRAIN).unlink()
    (root / TRAIN).symlink_to("../eval/shard-00000.bin")
    with pytest.raises(DataError, match=r"lies at .*eval/shard-00000\.bin"):
        open_split(root, "train")


def test_train_folder_that_links_to_eval_is_refused(make_shards: MakeShards) -> None:
    root = make_shards([[1, 2, 3]])
    shutil.rmtree(root / "train")
    (root / "train").symlink_to("eval")
    with pytest.raises(DataError, match=r"lies at .*eval/shard-00000\.bin"):
        open_split(root, "train")


def test_shards_reached_through_a_link_to_their_root_open(
    make_shards: MakeShards, tmp_path: Path
) -> None:
    (tmp_path / "link").symlink_to(make_shards([[1, 2, 3]]))
    assert open_split(tmp_path / "link", "train").num_tokens == 4


@pytest.mark.parametrize("how", ["copy", "hard link"])
def test_train_shard_equal_to_a_held_out_one_is_refused(make_shards: MakeShards, how: str) -> None:
    root = make_shards([[1, 2, 3, 4, 5, 6, 7, 8, 9]])
    (root / TRAIN).unlink()
    if how == "copy":
        shutil.copyfile(root / EVAL, root / TRAIN)
    else:
        (root / TRAIN).hardlink_to(root / EVAL)
    with pytest.raises(DataError, match="equals a shard of eval/"):
        open_split(root, "train")


def test_train_shard_listed_with_a_held_out_hash_is_refused(make_shards: MakeShards) -> None:
    root = make_shards([[1, 2, 3]])
    held_out = json.loads((root / "manifest.json").read_bytes())["splits"]["eval"]["shards"][0]
    _list_shard(root, "train", sha256=held_out["sha256"])
    with pytest.raises(DataError, match="equals a shard of eval/"):
        open_split(root, "train")


def test_missing_shard_is_refused(make_shards: MakeShards) -> None:
    root = make_shards([[1, 2, 3]])
    (root / TRAIN).unlink()
    with pytest.raises(DataError, match=r"shard-00000\.bin is missing"):
        open_split(root, "train")


@pytest.mark.parametrize("keep_bytes", [0, 5, 6])
def test_truncated_shard_is_refused_with_both_sizes(
    make_shards: MakeShards, keep_bytes: int
) -> None:
    root = make_shards([[1, 2, 3]])
    (root / TRAIN).write_bytes((root / TRAIN).read_bytes()[:keep_bytes])
    with pytest.raises(DataError, match=f"has {keep_bytes} bytes, 8 wanted for 4 tokens"):
        open_split(root, "train")


def test_empty_shard_is_refused_even_where_listed_so(make_shards: MakeShards) -> None:
    root = make_shards([[1, 2, 3]])
    (root / TRAIN).write_bytes(b"")
    _list_shard(root, "train", tokens=0, bytes=0)
    with pytest.raises(DataError, match="0 bytes"):
        open_split(root, "train")


def test_split_without_shards_is_refused(make_shards: MakeShards) -> None:
    root = make_shards([[1, 2, 3]])
    value = json.loads((root / "manifest.json").read_bytes())
    value["splits"]["train"] = {"tokens": 0, "documents": 0, "shards": []}
    (root / "manifest.json").write_bytes(canonical_bytes(value))
    with pytest.raises(DataError, match="no train shard"):
        open_split(root, "train")


@settings(
    max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(start=st.integers(0, 39), length=st.integers(1, 40))
def test_window_across_shards_reads_the_concatenation(
    shared_split_root: Path, start: int, length: int
) -> None:
    length = min(length, 40 - start)
    split = open_split(shared_split_root, "train")
    ids = [token for n in range(8) for token in (*range(1 + 4 * n, 5 + 4 * n), 0)]
    window = split.windows(np.array([start]), length)
    assert window.dtype == np.int64
    assert window.tolist() == [ids[start : start + length]]


@pytest.fixture
def shared_split_root(counting_shards: MakeShards) -> Path:
    """Eight shards of five ids, so that a window of 40 crosses them all."""
    return counting_shards(shards=8, tokens=5)


def test_g37_id_beyond_the_vocabulary_is_refused_where_it_is_read(
    make_shards: MakeShards,
) -> None:
    root = make_shards([[1, 2, 3], [4, 5, 6]], vocab_size=50_257, shard_tokens=4)
    path = root / "train" / "shard-00001.bin"
    np.array([4, 50_300, 6, 0], dtype="<u2").tofile(path)
    split = open_split(root, "train")
    expected = r"shard-00001\.bin holds the id 50300 at token 1, outside .* 50257"
    with pytest.raises(DataError, match=expected):
        split.windows(np.array([0, 3]), 4)


def test_g37_largest_id_of_the_vocabulary_is_read(make_shards: MakeShards) -> None:
    root = make_shards([[50_256]], vocab_size=50_257)
    assert open_split(root, "train").windows(np.array([0]), 2).tolist() == [[50_256, 0]]
